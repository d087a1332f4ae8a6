"""Jupyter's settings under `make edit` alone: lessons are paired with their sources.

    jupyter lab --config tools/jupyter_edit.py     from the repository's folder

Saving notebooks/NN.ipynb also writes source/lessons/NN.py, and opening it reads the source.
Exercises are never paired: the blank and the solution both come from one source, by the build.
"""

c = get_config()  # noqa: F821

c.ServerApp.contents_manager_class = "jupytext.TextFileContentsManager"
c.JupytextConfiguration.formats = "notebooks///ipynb,source/lessons///py:percent"
# The source keeps the course's keys and nothing that a kernel or the build wrote.
c.JupytextConfiguration.notebook_metadata_filter = "course,-all"
c.JupytextConfiguration.cell_metadata_filter = "tags,slideshow,then,now,since,generated,-all"
# A built notebook is always newer than its source; the cells come from the source all the same.
c.JupytextConfiguration.outdated_text_notebook_margin = float("inf")
