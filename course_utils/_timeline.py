"""The figure of a meter: memory over time, stacked by kind."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MiB = 2**20
HATCHES = ("", "///", "...", "\\\\\\", "xxx")  # a second cue beside the colour


def timeline(
    kinds: Sequence[str],
    changes: Sequence[Sequence[int]],
    marks: Sequence[tuple[int, str]],
    limit: int | None,
) -> "Figure":
    """Stack `changes` (bytes of each kind, one row a change) and name the moments of `marks`."""
    import matplotlib.pyplot as plt

    from course_utils.plots import COLOURS

    figure, axes = plt.subplots()
    bottom = [0.0] * len(changes)
    for number, kind in enumerate(kinds):
        top = [low + row[number] / MiB for low, row in zip(bottom, changes, strict=True)]
        look = {"facecolor": COLOURS[number], "hatch": HATCHES[number], "edgecolor": "white"}
        axes.fill_between(range(len(top)), bottom, top, step="post", label=kind, lw=0, **look)
        bottom = top
    peak = max(range(len(bottom)), key=bottom.__getitem__)
    largest = max(range(len(kinds)), key=lambda number: changes[peak][number])
    if limit is not None:
        axes.axhline(limit / MiB, color="black", linestyle="--", marker="", label="limit")
    axes.set(xlabel="allocations and releases, in order", ylabel="memory (MiB)")
    axes.set_ylim(
        0, 1.4 * max(bottom[peak], (limit or 0) / MiB)
    )  # room for the labels and the legend
    axes.set_xlim(0, len(bottom) - 1 or 1)
    for at, label in marks:
        axes.axvline(at, color="black", linestyle=":", marker="", linewidth=1)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(at, 1.05 * bottom[peak], label, rotation=30, fontsize=8, bbox=box)
    share = changes[peak][largest] / MiB / (bottom[peak] or 1)
    how = "most of it" if share > 0.5 else "the largest part of it"
    axes.set_title(f"{bottom[peak]:.3g} MiB at the peak, {how} {kinds[largest]}")
    figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    return figure
