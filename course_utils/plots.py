"""One plotting style, and figures that everybody can read.

    >>> plots.use_style()
    >>> fig, ax = plt.subplots()
    >>> ...
    >>> plots.show(fig, alt="Speed-up against matrix size: it passes 1 at 200 rows.")

`show` writes the image as HTML, because JupyterLab's own image renderer drops alt text.
"""

import base64
import html
import io
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), which colour-blind readers can
# tell apart. Its yellow is left out: on white it is too faint to read.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# The second cue: no line is told apart by its colour alone.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", "-", "--", "-.")

MAX_STORED = 98_000  # characters of the encoded image; with its alt text, 100 KB as stored
# What is tried in turn until the image is small enough: dots per inch, colours (None: all).
# Dots go before colours, because photographs in few colours show bands.
_ATTEMPTS = ((110, (None, 256)), (90, (256,)), (75, (256, 64, 32)))


def use_style() -> None:
    """Set matplotlib's defaults for this session: colours, markers, dashes, readable sizes."""
    import matplotlib
    from cycler import cycler

    cycle = cycler(color=COLOURS) + cycler(marker=MARKERS) + cycler(linestyle=DASHES)
    matplotlib.rcParams.update(
        {
            "axes.prop_cycle": cycle,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 13,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 12,
            "figure.figsize": (7.0, 4.0),
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "figure.titlesize": 13,
            "figure.titleweight": "bold",
            "font.size": 11,
            "grid.alpha": 0.35,
            "image.cmap": "cividis",
            "legend.frameon": False,
            "lines.linewidth": 2.0,
            "lines.markersize": 6.0,
            "savefig.facecolor": "white",
        }
    )


def show(fig: "Figure", alt: str, name: str | None = None) -> None:
    """Show `fig` in the notebook with its alt text, or save it when run as a plain script.

    `alt` says in a sentence what a reader who cannot see the figure should know. A script
    saves to `figures/<name>.png` (folder: environment variable COURSE_FIGURES); without a
    name, the title makes one. The figure is closed either way, so it is shown only once.
    Raises ValueError when the alt text says too little, when title or axis labels are
    missing, and when the image stays above 100 KB.
    """
    import matplotlib.pyplot as plt

    try:
        alt = _checked_alt(alt)
        title = _checked_title(fig)
        _check_axes(fig)
        png = _png(fig)
    finally:
        plt.close(fig)
    if _in_kernel():
        _display(png, alt)
    else:
        _save(png, _slug(name or title))


def _checked_alt(alt: str) -> str:
    alt = " ".join(alt.split())
    if len(alt) < 20 or " " not in alt:
        raise ValueError(
            f"alt={alt!r} says too little. Write a sentence of at least 20 characters with "
            "what the figure shows, for readers who cannot see it"
        )
    return alt


def _checked_title(fig: "Figure") -> str:
    suptitle = getattr(fig, "_suptitle", None)  # get_suptitle() came with matplotlib 3.8
    titles = [suptitle.get_text()] if suptitle is not None else []
    titles += [ax.get_title(loc) for ax in fig.axes for loc in ("left", "center", "right")]
    title = next((text for text in titles if text.strip()), None)
    if title is None:
        raise ValueError("the figure has no title: ax.set_title(...) with what it shows")
    return title


def _check_axes(fig: "Figure") -> None:
    for number, ax in enumerate(fig.axes):
        if not (ax.axison and ax.get_visible()):
            continue  # a picture without axes, as after ax.axis("off")
        missing = [which for which in "xy" if not _labelled(fig, ax, which)]
        if hasattr(ax, "_colorbar") and len(missing) < 2:
            continue  # a colour bar has one axis
        if missing:
            calls = " and ".join(f"ax.set_{which}label(...)" for which in missing)
            raise ValueError(f"axes {number} of the figure: {calls} is missing; name the unit too")


def _labelled(fig: "Figure", ax: "Axes", which: str) -> bool:
    """Has this axis a label, its own or a shared one, or no numbers that need one?"""
    axis = getattr(ax, f"{which}axis")
    if not axis.get_visible() or len(axis.get_ticklocs()) == 0:
        return True
    if getattr(fig, f"_sup{which}label", None) is not None:
        return True
    shared = getattr(ax, f"get_shared_{which}_axes")().get_siblings(ax)
    return any(getattr(other, f"get_{which}label")().strip() for other in shared)


def _png(fig: "Figure") -> bytes:
    """The figure as PNG, at the best quality that stays within MAX_STORED once encoded."""
    for dpi, palettes in _ATTEMPTS:
        buffer = io.BytesIO()
        # No software tag: the same figure gives the same bytes under every matplotlib.
        fig.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", metadata={"Software": None})
        for colours in palettes:
            png = buffer.getvalue() if colours is None else _fewer_colours(buffer, colours)
            if len(png) * 4 / 3 < MAX_STORED:
                return png
    raise ValueError(
        f"the figure takes {len(png) * 4 / 3 / 1000:.0f} KB, more than 100 KB. "
        "Make it smaller, or plot fewer points or pictures"
    )


def _fewer_colours(png: io.BytesIO, colours: int) -> bytes:
    from PIL import Image

    small = io.BytesIO()
    image = Image.open(png).convert("RGB")
    # Dithering would make dots of flat areas, which do not compress.
    image.quantize(colours, dither=Image.Dither.NONE).save(small, format="PNG", optimize=True)
    return small.getvalue()


def _in_kernel() -> bool:
    """True in a Jupyter kernel; False in a script, a rank, or a terminal's IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _display(png: bytes, alt: str) -> None:
    from IPython.display import display

    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    image = f'<img alt="{html.escape(alt)}" src="{source}" style="max-width:100%;height:auto">'
    # A bundle instead of HTML(...): whatever cannot show HTML then prints the alt text.
    display({"text/html": image, "text/plain": f"[figure: {alt}]"}, raw=True)


def _save(png: bytes, name: str) -> None:
    folder = Path(os.environ.get("COURSE_FIGURES") or "figures")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    path.write_bytes(png)
    print(f"figure saved: {os.path.relpath(path)}")


def _slug(text: str) -> str:
    """Lower-case words joined by dashes: a file name that is safe everywhere."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "figure"
