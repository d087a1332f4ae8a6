# ---
# jupyter:
#   course:
#     rows: [D5, M7]
#     minutes: {read: 5, do: 25}
#     devices: 1
#     path: core
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
# # Exercise 02: a fast power, an honest timer, a speed-up table
#
# You write the three tools with which lesson 02 answered its question: a power that needs few products, a timer that can be trusted, and the table of speed-up and efficiency.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 25 to do: about 10, 10 and 5 for the three tasks |
# | **You should know** | [lesson 02, Two devices, one sum](../notebooks/02_two_devices_one_sum.ipynb) |
# | **Runs on** | every machine, in plain Python: the checks use a made-up device and a made-up clock |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("02-matpow")` is a nudge, `hint("02-matpow", level=2)` the way, `level=3` nearly the code. A check that never ends is a loop in your code: stop it with the notebook's stop button.

# %%
from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: a power with few products (4 points)
#
# The 2016 code computed A¹⁰ by a recursion, one more factor A at each level, and stopped one level too late. A trick shows it: put 1 for the matrix and + for the product, and the result is the number of factors.


# %%
# NBVAL_CHECK_OUTPUT
def matpow_2016(m, n):
    return m if n < 1 else m + matpow_2016(m, n - 1)


print(matpow_2016(1, 10), "factors for the power of 10")

# %% [markdown]
# Write `matpow(m, n, product)`. It returns m to the power n: n factors m, for any whole number n from 1 on. Touch m only by `product(a, b)`, which returns a·b: so the same function serves TensorFlow, PyTorch and plain lists. The check counts the calls.
#
# Multiplying by m each time takes n − 1 products and earns half of the points. For all of them the number of products must grow like log n: n = 63 takes at most a dozen. A product can be used more than once. The trick from above counts your factors: `matpow(1, 10, lambda a, b: a + b)`.


# %% task="02-matpow"
def matpow(m, n, product):
    """Return m to the power n.

    m: a square matrix, n: a whole number >= 1,
    product: a function (a, b) -> a·b; the only way to multiply.
    """
    ### BEGIN SOLUTION
    result, square = None, m
    while True:
        if n % 2:
            result = square if result is None else product(result, square)
        n //= 2
        if n == 0:
            return result
        square = product(square, square)
    ### END SOLUTION


# %% [markdown]
# Does it have n factors, from few products?

# %% test="02-matpow"
check("02-matpow")

# %% [markdown]
# ## Task 2: a timer that tells the truth (4 points)
#
# A device works behind your back: a call may return before the device has computed anything. And the very first call is slow for reasons of its own, such as compilation. Write `measure(fn, sync, repeat, clock)`:
#
# 1. call `fn()` once to warm up; this call does not count;
# 2. then measure `repeat` runs, each by itself. `sync()` returns when the device has nothing left to do. `clock()` returns the time in seconds. Decide where each run needs them, so that it measures one run and nothing else;
# 3. return the median of the runs, in seconds. With an even number of runs that is the mean of the two in the middle, as in `statistics.median`.
#
# Use `clock`, not the `time` module. The check passes in a made-up device and its made-up clock: they are slow at the first call, have work of somebody else still running, or are slow once in a while.

# %% task="02-timer"
import statistics


def measure(fn, sync, repeat, clock):
    """Return the median time of a run of fn, in seconds.

    fn: the work, called without arguments. sync: waits until the device is idle.
    repeat: how many runs to measure, >= 1. clock: returns the time now, in seconds.
    """
    ### BEGIN SOLUTION
    fn()
    runs = []
    for _ in range(repeat):
        sync()
        start = clock()
        fn()
        sync()
        runs.append(clock() - start)
    return statistics.median(runs)
    ### END SOLUTION


# %% [markdown]
# Does it avoid the four mistakes: the first call counted, no `sync` before the run, no `sync` after it, the mean instead of the median?

# %% test="02-timer"
check("02-timer")

# %% [markdown]
# ## Task 3: speed-up and efficiency (3 points)
#
# You have measured the same work on 1, 2, …, n devices. **Speed-up** on k devices: how many times as fast as on one device. **Efficiency**: the speed-up divided by k, so 1 means that every device did its full share.
#
# Write `speedup_table(seconds)`: `seconds[0]` is the time on one device, `seconds[1]` that on two, and so on. Return a list with one row for each: `(devices, speed-up, efficiency)`. Do not round.
#
# The times need not fall: more devices may be slower, and the table must say so.


# %% task="02-speedup"
def speedup_table(seconds):
    """Return a list of rows (devices, speed-up, efficiency).

    seconds: list of times in seconds, the first on 1 device, the next on 2, and so on.
    """
    ### BEGIN SOLUTION
    rows = []
    for devices, time in enumerate(seconds, start=1):
        speedup = seconds[0] / time
        rows.append((devices, speedup, speedup / devices))
    return rows
    ### END SOLUTION


# %% [markdown]
# Does the table say what the times say?

# %% test="02-speedup"
check("02-speedup")

# %% [markdown]
# ## Done?
#
# You have now written the core of `course_utils.timing`, which measures in all later lessons. It does one thing more: to compare functions it lets them take turns, one run of each in every round, so that a slow moment of the machine does not fall on one of them alone. One way to solve each task is in the [solution of exercise 02](../solutions/02_two_devices_one_sum.ipynb). Compare it with yours after you have tried.
