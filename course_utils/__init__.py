"""Helpers of the course on training with many GPUs.

Each module stands alone and is short enough to be read in class:

* :mod:`course_utils.devices`: what the machine has, and which devices ranks get
* :mod:`course_utils.launch`: run a notebook's function on several ranks
* :mod:`course_utils.timing`: measure so that the number can be believed
* :mod:`course_utils.datasets`: real data that needs no network
* :mod:`course_utils.plots`: one plotting style
* :mod:`course_utils.doctor`: what is wrong with this installation, in words
* :mod:`course_utils.grading`: ``check()`` and ``hint()`` of the exercises

Importing this package imports neither torch nor TensorFlow.
"""

__version__ = "0.1.0"
