"""Figures: one style, alt text that survives in the notebook, and images that stay small."""

import base64
import html
import io
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from PIL import Image

from course_utils import datasets, plots

ROOT = Path(__file__).resolve().parent.parent
ALT = "Speed-up against size: it passes one at 200 rows."


@pytest.fixture(autouse=True)
def own_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_FIGURES", str(tmp_path / "figures"))
    with matplotlib.rc_context():
        yield tmp_path / "figures"
    plt.close("all")


def good_figure():
    fig, ax = plt.subplots()
    ax.plot([64, 128], [0.9, 1.8])
    ax.set(title="Two devices pay: 1.8× at 128!", xlabel="size (rows)", ylabel="speed-up (×)")
    return fig


def test_a_script_saves_the_figure_prints_where_and_closes_it(own_figures, capsys, monkeypatch):
    monkeypatch.chdir(own_figures.parent)
    fig = good_figure()
    plots.show(fig, alt=ALT)
    assert capsys.readouterr().out == "figure saved: figures/two-devices-pay-1-8-at-128.png\n"
    image = Image.open(own_figures / "two-devices-pay-1-8-at-128.png")
    assert image.width > 400
    assert not plt.fignum_exists(fig.number)


def test_the_default_folder_is_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COURSE_FIGURES")
    monkeypatch.chdir(tmp_path)
    plots.show(good_figure(), alt=ALT, name="my figure")
    assert (tmp_path / "figures" / "my-figure.png").is_file()


def test_a_name_cannot_leave_the_folder(own_figures):
    plots.show(good_figure(), alt=ALT, name="../../escape")
    assert [path.name for path in own_figures.iterdir()] == ["escape.png"]


@pytest.mark.parametrize("alt", ["", "   ", "speed-up", "x" * 40])
def test_an_alt_text_that_says_nothing_is_refused(alt, own_figures):
    fig = good_figure()
    with pytest.raises(ValueError, match="Write a sentence"):
        plots.show(fig, alt=alt)
    assert not own_figures.exists()
    assert not plt.fignum_exists(fig.number)


def test_a_figure_without_title_or_labels_is_refused():
    fig = good_figure()
    fig.axes[0].set_title("")
    with pytest.raises(ValueError, match="no title"):
        plots.show(fig, alt=ALT)
    fig = good_figure()
    fig.axes[0].set_xlabel("")
    with pytest.raises(ValueError, match=r"ax\.set_xlabel\(\.\.\.\) is missing"):
        plots.show(fig, alt=ALT)
    fig = good_figure()
    fig.axes[0].set(xlabel="", ylabel=" ")
    with pytest.raises(ValueError, match="set_xlabel.* and .*set_ylabel"):
        plots.show(fig, alt=ALT)


def test_labels_may_be_shared_or_needless(own_figures):
    fig, axes = plt.subplots(2, 2, sharex=True, sharey=True)
    for ax in axes.flat:
        ax.plot([1, 2])
    fig.suptitle("Four ranks, one curve")
    axes[1, 0].set(xlabel="step", ylabel="loss")  # as after label_outer()
    plots.show(fig, alt=ALT, name="shared")

    fig, (left, right) = plt.subplots(1, 2)
    left.imshow(np.eye(3))
    left.axis("off")
    picture = right.imshow(np.eye(3))
    right.set(xlabel="column", ylabel="row", title="A matrix")
    fig.colorbar(picture, ax=right, label="value")
    plots.show(fig, alt=ALT, name="pictures")

    fig, (top, bottom) = plt.subplots(2, 1)
    top.plot([1, 2])
    bottom.barh([0, 1], [1, 2])
    fig.supxlabel("time (ms)")
    fig.supylabel("rank")
    fig.suptitle("Rank 1 waits")
    plots.show(fig, alt=ALT, name="super")
    assert len(list(own_figures.iterdir())) == 3


def test_photographs_are_made_to_fit(own_figures):
    train, _ = datasets.photo_patches(80, limit=48)
    fig, axes = plt.subplots(4, 12, figsize=(9, 4))
    for ax, patch in zip(axes.flat, train, strict=True):
        ax.imshow(patch)
        ax.axis("off")
    fig.suptitle("48 patches")
    plots.show(fig, alt=ALT, name="patches")
    assert (own_figures / "patches.png").stat().st_size * 4 / 3 < 100_000


def test_a_figure_that_cannot_be_made_small_is_an_error(own_figures):
    fig, ax = plt.subplots(figsize=(8, 8))
    noise = np.random.default_rng(0).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    ax.imshow(noise)
    ax.set(title="Noise", xlabel="x (pixels)", ylabel="y (pixels)")
    with pytest.raises(ValueError, match="more than 100 KB"):
        plots.show(fig, alt=ALT)
    assert not own_figures.exists()


def test_the_style_tells_lines_apart_twice():
    plots.use_style()
    _, ax = plt.subplots()
    lines = [ax.plot([0, 1])[0] for _ in plots.COLOURS]
    assert len({line.get_color() for line in lines}) == len(plots.COLOURS) >= 7
    assert len({line.get_marker() for line in lines}) == len(plots.MARKERS) >= 7
    assert lines[0].get_linestyle() != lines[1].get_linestyle()
    assert matplotlib.rcParams["font.size"] >= 11


def test_every_colour_can_be_seen_on_white():
    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in plots.COLOURS:
        contrast = 1.05 / (luminance(matplotlib.colors.to_rgb(colour)) + 0.05)
        assert contrast > 2, colour


def test_in_a_real_kernel_the_alt_text_is_in_the_html():
    from nbclient import NotebookClient

    alt = 'Loss "falls" & rank 1 < rank 0, as expected.'
    cell = f"""
import matplotlib.pyplot as plt
from course_utils import plots
plots.use_style()
fig, ax = plt.subplots()
ax.plot([1, 2])
ax.set(title="It falls", xlabel="step", ylabel="loss")
plots.show(fig, alt={alt!r})"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    (output,) = notebook.cells[0].outputs  # one picture, not a second one from the backend
    assert output.output_type == "display_data"
    text = output.data["text/html"]
    assert len(text) < 100_000
    (found,) = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,[^"]+"', text)
    assert html.unescape(found) == alt and "<" not in found
    assert alt in output.data["text/plain"]
    png = base64.b64decode(re.search(r"base64,([^\"]+)", text).group(1))
    assert Image.open(io.BytesIO(png)).width > 400
