# ---
# jupyter:
#   course:
#     rows: [M5, M8]
#     minutes: {read: 8, do: 32}
#     devices: 1
#     path: more
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 13: staleness, placement, divergence
#
# You compute how old the gradients of a schedule are, spread variables over servers by their size, and simulate asynchronous descent to find the learning rate at which it diverges.
#
# | | |
# |---|---|
# | **Time** | 8 minutes to read, 32 to do: about 7, 12 and 13 for the three tasks |
# | **You should know** | [lesson 13, Parameter servers](../notebooks/13_parameter_server.ipynb) |
# | **Runs on** | every machine, in plain Python: schedules and sizes are lists of numbers |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. `hint("13-staleness")` is a nudge, `level=2` the way, `level=3` most of the code. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.

# %%
from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: the staleness of a schedule (4 points)
#
# A schedule is a list of events in the order in which the server sees them: `("pull", worker)` and `("push", worker)`, workers being whole numbers. Each push belongs to the latest pull of the same worker. Its staleness is the number of pushes that the server saw between the two.
#
# Write `staleness(events)`: a list with one whole number for each push, in the order of the pushes.
#
# A worker may pull twice before it pushes: it died after the first pull and came back. What it had computed is lost.

# %%
# NBVAL_CHECK_OUTPUT
example = [("pull", 0), ("pull", 1), ("push", 0), ("pull", 0), ("push", 0), ("push", 1)]
for number, event in enumerate(example):
    print(number, *event)
print("worker 1 pulled at event 1 and pushes at event 5; pushes in between: 2")


# %% task="13-staleness"
def staleness(events):
    """The staleness of each push. events: list of ("pull" or "push", worker)."""
    ### BEGIN SOLUTION
    version, seen, found = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            seen[worker] = version
        else:
            found.append(version - seen[worker])
            version += 1
    return found
    ### END SOLUTION


# %% test="13-staleness"
check("13-staleness")

# %% [markdown]
# ## Task 2: variables over servers, by size (6 points)
#
# TensorFlow deals variables out one by one, whatever their size. Do better, in two steps.
#
# `shards(rows, row_bytes, servers, least)` cuts one table into pieces along its rows and returns the number of rows of each piece, in order. There are as many pieces as these three rules allow, and always at least one:
#
# 1. no more pieces than servers;
# 2. no piece without a row;
# 3. every piece has at least `least` bytes. (A table that is smaller itself stays whole.)
#
# The pieces are as even as can be: no two differ by more than one row.
#
# `place(sizes, servers)` returns the number of a server, from 0 on, for each variable, in the order of `sizes` (bytes). No variable is cut here. The server with the most bytes should have few: at most 4/3 of what the best of all placements gives its fullest server. Trying all placements would take too long for a real model, and you need not.
#
# This cell shows how far round-robin is from that, for six variables on two servers.

# %%
# NBVAL_CHECK_OUTPUT
sizes = [400, 1, 300, 1, 200, 1]
dealt = [sum(sizes[0::2]), sum(sizes[1::2])]
print("round-robin:", dealt, " fullest:", max(dealt))
print("400 + 1 + 1 on one, 300 + 200 + 1 on the other; fullest:", 501)


# %% task="13-partition"
def shards(rows, row_bytes, servers, least):
    """The number of rows of each piece of one table."""
    ### BEGIN SOLUTION
    needed = max(1, -(-least // row_bytes))  # rows that make `least` bytes, rounded up
    number = max(1, min(servers, rows, rows // needed))
    whole, rest = divmod(rows, number)
    return [whole + (piece < rest) for piece in range(number)]
    ### END SOLUTION


def place(sizes, servers):
    """The server of each variable, so that the fullest server is nearly as empty as can be."""
    ### BEGIN SOLUTION
    loads, where = [0] * servers, [0] * len(sizes)
    for variable in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        server = loads.index(min(loads))
        loads[server] += sizes[variable]
        where[variable] = server
    return where
    ### END SOLUTION


# %% test="13-partition"
check("13-partition")

# %% [markdown]
# ## Task 3: asynchronous descent, and where it diverges (6 points)
#
# The loss is ½·curvature·w², so the gradient at w is curvature · w. Each update takes the gradient at the weight of `delay` updates ago, and moves the newest weight:
#
# $$w_{t+1} = w_t - \text{rate} \cdot \text{curvature} \cdot w_{t - \text{delay}}$$
#
# While there is no weight so old, the gradient is that at the first one.
#
# `simulate(rate, curvature, delay, steps, start)` returns the list of all weights, `start` and one more after each step.
#
# `largest_rate(curvature, delay)` returns the largest rate with which the weights do not grow without end, correct to 1 %. Find it with your `simulate`: a rate that is too large makes the weights swing wider and wider. Near the limit they do so slowly: a few steps show nothing yet. Look at the largest weight of many steps, not at the last one, which may swing past 0. Far above the limit they grow until Python can hold them no more, and become `inf` or `nan`; every comparison with `nan` is False. Delays go up to 8. The check gives you a few seconds.
#
# To compare: these are the first weights for rate 0.5, curvature 1 and delay 1, written out by hand.

# %%
# NBVAL_CHECK_OUTPUT
w0 = 1.0
w1 = w0 - 0.5 * w0  # no older one yet
w2 = w1 - 0.5 * w0
w3 = w2 - 0.5 * w1
print(w0, w1, w2, w3)


# %% task="13-diverge"
def simulate(rate, curvature, delay, steps, start):
    """All weights: start, and one more after each step."""
    ### BEGIN SOLUTION
    weights = [start]
    for step in range(steps):
        old = weights[max(0, step - delay)]
        weights.append(weights[-1] - rate * curvature * old)
    return weights
    ### END SOLUTION


def largest_rate(curvature, delay):
    """The largest rate with which the weights do not grow without end, to 1 %."""
    ### BEGIN SOLUTION
    low, high = 0.0, 4.0 / curvature
    for _ in range(15):
        rate = (low + high) / 2
        sizes = [abs(w) for w in simulate(rate, curvature, delay, 4000, 1.0)]
        if max(sizes[-200:]) <= max(sizes[:200]):  # not so for a weight that is no number
            low = rate
        else:
            high = rate
    return low
    ### END SOLUTION


# %% test="13-diverge"
check("13-diverge")

# %% [markdown]
# ## When you are done
#
# There is a formula for your last answer: 2·sin(π / (2·(2·delay + 1))) / curvature (Levin and May, 1976). Compare. Then two questions to carry on with: By what factor does the limit fall from delay 0 to delay 8, and what would that do to training with nine workers? And which curvature has your model, of which you know only the loss?
#
# One way to solve each task is in the [solution of exercise 13](../solutions/13_parameter_server.ipynb). [Back to lesson 13](../notebooks/13_parameter_server.ipynb)
