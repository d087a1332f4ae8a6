# ---
# jupyter:
#   course:
#     rows: [D1, D2, D3, D4, M1]
#     minutes: {read: 20, do: 10}
#     devices: 2
#     path: core
#     extra: tensorflow,torch
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
# # Device placement: where did that operation run?
#
# After this lesson you can list the devices that TensorFlow and PyTorch see, say on which of them an operation ran, prove it, and decide it yourself.
#
# | | |
# |---|---|
# | **Time** | 20 minutes to read, 10 to do |
# | **You should know** | what a matrix product is; [lesson 00](00_start_here.ipynb) |
# | **You will** | list devices · read `.device` and a placement log · place operations · meet the errors for a device that is missing or wrong · run one program on two pinned processes |
# | **Runs on** | no GPU, or one: two logical CPU devices and two pinned cores · two GPUs or more: the same, and PyTorch's ranks on the GPUs (TensorFlow needs its GPU environment for that, see the README) |
# | **Last verified** | Python 3.11, TensorFlow 2.21.0, PyTorch 2.13.0 |

# %%
import ctypes
import json
import os
import re
import sys
import tempfile
from contextlib import contextmanager

# Most of TensorFlow's notices off: they would hide the lines that this lesson looks for.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from course_utils.devices import census, slots
from course_utils.launch import launch
from course_utils.timing import compare

# %% [markdown]
# TensorFlow may have printed that it found no CUDA drivers. On a machine without an NVIDIA GPU that is as it should be.

# %%
print(census())
devices = slots(2, framework="tensorflow")
assert len(devices) == 2, "this lesson runs on two devices"

# %% [markdown]
# ## What are the devices called?
#
# TensorFlow names a device by its type and its number: `/CPU:0`, `/GPU:0`, `/GPU:1`. In 2016 people wrote `/cpu:0` and `/gpu:0`; both spellings work.
#
# A **physical device** is what the machine has. A **logical device** is what your program sees. One physical device can be split into several logical ones. All the cores of the machine together count as *one* physical CPU.
#
# GPUs have one more setting that everybody needs sooner or later: **memory growth**. Without it TensorFlow takes nearly all of a GPU's memory when it starts ([TensorFlow's GPU guide](https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth) says so). With it, memory is taken when it is needed.
#
# **Predict.** The next cell splits the CPU in two. How many physical CPUs are listed afterwards, and how many logical ones?


# %%
# NBVAL_CHECK_OUTPUT
def split_the_cpu():
    cpu = tf.config.list_physical_devices("CPU")[0]
    if not tf.config.get_logical_device_configuration(cpu):  # splitting twice is an error
        two = [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
        tf.config.set_logical_device_configuration(cpu, two)


for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
split_the_cpu()
print("physical:", [device.name for device in tf.config.list_physical_devices("CPU")])
print("logical: ", [device.name for device in tf.config.list_logical_devices("CPU")])

# %% [markdown]
# One physical CPU, two logical ones. Settings like these must come before the devices start, and listing the logical ones starts them. Afterwards it is too late. A GPU can also be given a `memory_limit` in MiB when it is split; for a CPU that is an error.

# %%
# NBVAL_CHECK_OUTPUT
cpu = tf.config.list_physical_devices("CPU")[0]
three = [tf.config.LogicalDeviceConfiguration()] * 3
limited = [tf.config.LogicalDeviceConfiguration(memory_limit=1024)]
for attempt in [three, limited]:
    try:
        tf.config.set_logical_device_configuration(cpu, attempt)
    except (RuntimeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("a CPU in use was split again")

# %% [markdown]
# Old posts list devices with `device_lib` instead. It still works, but it starts devices *of its own* each time, and knows nothing of the two logical ones that you made. The `incarnation` is the number of one start of a device, so listing twice gives it away.

# %%
from tensorflow.python.client import device_lib

for _ in range(2):
    for found in device_lib.list_local_devices():
        print(
            f"{found.name}  type {found.device_type}  "
            f"limit {found.memory_limit / 2**20:.0f} MiB  incarnation {found.incarnation}"
        )
print("memory of this machine:", f"{census().cpu.total_memory / 2**20:.0f} MiB")

# %% [markdown]
# Another incarnation each time: another device. And the limit that it prints for a CPU has nothing to do with your memory, as the last line shows. `device_lib` lies under `tensorflow.python`, which is private; new code uses `tf.config`.
#
# ## Which device did it?
#
# Start with two small matrices, so that you can follow by hand. Every tensor knows where it lives: `.device`.
#
# **Predict.** Nothing in this cell says where to run. What will `.device` end in?

# %%
# NBVAL_CHECK_OUTPUT
a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
c = tf.matmul(a, b)
print(c.numpy())
print(c.device)
assert c.device.endswith("GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0")

# %% [markdown]
# Read the name from its end: device `CPU:0`, of task 0, of the job `localhost`. With one machine you can ignore job and task; below there will be two tasks. You said nothing, and of the two logical devices TensorFlow took the one with the lowest number. If there are GPUs it prefers [the lowest-numbered GPU](https://www.tensorflow.org/guide/gpu#manual_device_placement).
#
# ## The placement log
#
# `.device` tells where a result lies. The **placement log** tells where *every* operation ran, also those inside a `tf.function`: a function that TensorFlow compiles into a fixed plan of operations, which you cannot ask. The log is written by TensorFlow's C++ code, around Python's `print`. In a notebook such lines come late, out of order, or [not at all](https://github.com/tensorflow/tensorflow/issues/24686). So catch them where they pass: at the file descriptors 1 and 2, the numbers under which the system knows a process's output and its error output.


# %%
@contextmanager
def native_output():
    """Collect what C++ code prints in this block: a list of lines, filled when it ends."""
    lines = []
    flush = ctypes.CDLL(None).fflush if os.name != "nt" else ctypes.cdll.msvcrt.fflush
    sys.stdout.flush(), sys.stderr.flush(), flush(None)
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 1), os.dup2(caught.fileno(), 2)
        try:
            yield lines
        finally:  # put the descriptors back even when the block fails
            flush(None)
            os.dup2(saved[0], 1), os.dup2(saved[1], 2)
            os.close(saved[0]), os.close(saved[1])
            caught.seek(0)
            lines += caught.read().decode(errors="replace").splitlines()


# %% [markdown]
# The log has to be on before TensorFlow starts its devices, and then it stays on until the process ends. So give it a process of its own: `launch` runs a function in one, and returns what it returns.


# %%
@tf.function
def product_on_device_1(a, b):
    with tf.device("/CPU:1"):
        return tf.matmul(a, b)


def placement_log(switched_on):
    split_the_cpu()
    with native_output():  # what comes before the product is not looked at
        if switched_on == "before the first operation":
            tf.debugging.set_log_device_placement(True)
        ones = tf.ones([2, 2])  # the first operation starts the devices
        tf.debugging.set_log_device_placement(True)
    with native_output() as log:
        product_on_device_1(ones, ones)
    return log


(log,) = launch(placement_log, 1, "before the first operation", framework="tensorflow")
print(*log, sep="\n")
assert any(re.search(r"MatMul: \(MatMul\): .*CPU:1$", line) for line in log)

# %% [markdown]
# Find the line with `MatMul: (MatMul)`: the name of the operation, its kind, and the device. The `_Arg` and `_Retval` lines are what goes into the function and what comes out; `Identity` hands the result on. They may lie elsewhere than the product, and TensorFlow copies between. One task of this lesson's exercise is to turn such a log into a table.
#
# **Predict.** How many lines does the log have when it is switched on *after* the first operation?

# %%
# NBVAL_CHECK_OUTPUT
(late,) = launch(placement_log, 1, "after it", framework="tensorflow")
print("on before the first operation: the log has lines:", len(log) > 0)
print("on after it:                   the log has lines:", len(late) > 0)
assert log and not late

# %% [markdown]
# When it comes too late nothing happens: no error, and no log. In your own programs switch it on right after the import.
#
# ## Place it
#
# `with tf.device(...)` decides the device of whatever is created in its block. `product_on_device_1` did that inside a function. (Posts call this *pinning*; in this course that word is for processes on cores.)
#
# **Predict.** Here `x` is made on device 0 and used on device 1. Is that an error? Where does the product end up, and where is `x` afterwards?

# %%
# NBVAL_CHECK_OUTPUT
with tf.device("/CPU:0"):
    x = tf.ones([2, 2])
with tf.device("/CPU:1"):
    y = tf.matmul(x, x)

for name, tensor in {"x": x, "y": y}.items():
    print(name, "is on", tensor.device.split("device:")[1])

# %% [markdown]
# No error: TensorFlow copied `x` to device 1 for the product, and left the original where it was. PyTorch will not do that, as you will see.
#
# ## Break it: a device that does not exist
#
# **Soft placement** lets TensorFlow choose another device when yours is missing. It is on at the start.
#
# **Predict.** You have no `/GPU:42`. Which of these two runs fails, and where does the other one run?


# %%
# NBVAL_CHECK_OUTPUT
def on_device_42():
    with tf.device("/GPU:42"):
        return tf.matmul(x, x).device


tf.config.set_soft_device_placement(True)
where = on_device_42()
print("soft placement on:  ran on", where)
assert "42" not in where

tf.config.set_soft_device_placement(False)
try:
    on_device_42()
except tf.errors.InvalidArgumentError as error:
    print("soft placement off:", error.message)
else:
    raise AssertionError("a device that does not exist was accepted")
tf.config.set_soft_device_placement(True)

# %% [markdown]
# With soft placement on, a typing error in a device name is no error: only `.device` and the log give it away. While you develop, switch it off, and read the error: it lists the devices that there are.
#
# ## Then → now: the program of 2016
#
# In 2016, in chapter 6 of *First Contact with TensorFlow*, a program first built a **graph**, a plan of operations, and then ran it in a **session**. This is an equivalent of its listing in the words of that time, with CPUs for its GPUs; `tf.compat.v1` still runs it. It multiplies the same matrices on two devices and adds the products up on the first. The session is told to make two CPU devices, because sessions were where devices were configured.
#
# **Predict.** One product is `[[22, 28], [49, 64]]`. What is the sum of two?

# %%
# NBVAL_CHECK_OUTPUT
v1 = tf.compat.v1


def program_of_2016():
    with tf.Graph().as_default():
        products = []
        for name in ["/cpu:0", "/cpu:1"]:
            with tf.device(name):
                left = v1.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
                right = v1.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
                products.append(v1.matmul(left, right))
        with tf.device("/cpu:0"):
            total = v1.add_n(products)
        config = v1.ConfigProto(log_device_placement=True, device_count={"CPU": 2})
        with v1.Session(config=config) as session:
            return session.run([products[0], total])


with native_output() as log:
    one_product, total_2016 = program_of_2016()
print(*sorted({line for line in log if re.match(r"(MatMul|AddN)", line)}), sep="\n")
print(one_product.tolist(), "is one product")
print(total_2016.tolist(), "is the sum of two")

# %% [markdown]
# The first line is the session's own: it lists the GPUs that it found. Then two products on two devices, and `AddN` on the first. The same today, with neither graph nor session:

# %%
# NBVAL_CHECK_OUTPUT
products = []
for name in ["/CPU:0", "/CPU:1"]:
    with tf.device(name):
        products.append(tf.matmul(a, b))
with tf.device("/CPU:0"):
    total_today = tf.add_n(products)

print("products on", [product.device[-5:] for product in products])
print(total_today.numpy().tolist())
assert np.array_equal(total_today, total_2016)
assert np.array_equal(total_today, 2 * tf.matmul(a, b)), "two devices must equal one"

# %% [markdown]
# Equal to the last bit: each product was the same arithmetic in the same order, only elsewhere. When a *sum* is split over devices its order changes, and then a tolerance is needed; later lessons meet that.
#
# ## Two names, or two devices?
#
# A logical device is a name. Does it also bring computing power? Measure: two large products, once both on device 0, once on one device each.
#
# **Predict.** Does the second way take half as long, or just as long?

# %%
A, B = tf.random.stateless_uniform([2, 768, 768], seed=[1, 2])


def two_products(first, second):
    @tf.function
    def run(a, b):
        with tf.device(first):
            left = tf.matmul(a, a)
        with tf.device(second):  # another matrix: TensorFlow would compute the same one once
            right = tf.matmul(b, b)
        return left[0, 0], right[0, 0]

    return lambda: [result.numpy() for result in run(A, B)]


result = compare(
    {
        "both on CPU:0": two_products("/CPU:0", "/CPU:0"),
        "CPU:0 and CPU:1": two_products("/CPU:0", "/CPU:1"),
    },
    repeat=9,
)
print(result)

# %% [markdown]
# In the last column 0.50 would mean that the second device brought power of its own. It does not come near: both ways run in one process, on the same cores. Logical devices are right for learning where things go, and wrong for timing. For power you need a device of its own, and on a CPU that is a process with a core of its own.
#
# ## Two processes, one program: gRPC
#
# TensorFlow can reach devices in other processes, on this machine or on another. Each process runs a **server**, and the servers know each other's addresses from the environment variable `TF_CONFIG`; together they are a **cluster**. A **client**, the process that says what to compute, then sees all their devices under full names: `/job:worker/task:1/device:CPU:0`.
#
# `launch` starts one process on each device and writes `TF_CONFIG`. It keeps every process alive until all have returned. The function below starts the server. Worker 0 is also the client: it places one product on each task, and the sum on task 0.


# %%
def grpc_sum():
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = tf.train.ClusterSpec(config["cluster"]), config["task"]
    tf.distribute.Server(cluster, task["type"], task["index"])
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else "any"
    if task["index"] > 0:
        return os.getpid(), cores, None, None  # its server works on until both have returned

    tf.config.experimental_connect_to_cluster(cluster, job_name="client")
    a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    products = []
    for index in range(2):
        with tf.device(f"/job:worker/task:{index}"):
            products.append(tf.matmul(a, b))
    with tf.device("/job:worker/task:0"):
        total = tf.add_n(products)
    return os.getpid(), cores, [product.device for product in products], total.numpy().tolist()


workers = launch(grpc_sum, framework="tensorflow", roles={"worker": 2})
for slot, (process, cores, _, _) in zip(devices, workers, strict=True):
    print(f"worker {slot.rank}: process {process}, given {slot.name}, may run on cores {cores}")
assert workers[0][0] != workers[1][0]

# %%
# NBVAL_CHECK_OUTPUT
_, _, placed, total_grpc = workers[0]
print(*placed, sep="\n")
print(total_grpc)
assert np.array_equal(total_grpc, total_today), "two processes must equal one device"

# %% [markdown]
# Two tasks, two processes, two cores, and the same four numbers. Across machines `TF_CONFIG` holds their addresses instead of this one's. Lesson 02 gives these two workers enough to do to see whether the second one pays.
#
# ## The same in PyTorch
#
# PyTorch names devices `cpu`, `cuda:0`, `cuda:1`. It has no soft placement and copies nothing unasked: you move a tensor with `.to(device)`, and an operation needs all its inputs in one place.
#
# One device exists on every machine beside the CPU: `meta`. Its tensors have a shape and a type, but no numbers. Here it stands in for the GPU that you may not have.
#
# **Predict.** Which line of this cell is the first to fail?

# %%
# NBVAL_CHECK_OUTPUT
on_cpu = torch.ones(2, 2)
elsewhere = on_cpu.to("meta")
print("moved to:", elsewhere.device, "| the original is still on:", on_cpu.device)

with torch.device("meta"):  # what is created in this block goes there by default
    print("created on:", torch.ones(3).device)

try:
    on_cpu + elsewhere
except RuntimeError as error:
    print("RuntimeError:", error)
else:
    raise AssertionError("tensors on two devices were added")

# %% [markdown]
# With a GPU the message begins with `Expected all tensors to be on the same device`; [only copies may cross](https://docs.pytorch.org/docs/stable/notes/cuda.html). Look for a model that was moved and a batch that was not, or the other way round: print the `.device` of both, and move the batch.
#
# Asking for a device that this machine or this PyTorch does not have fails at once, too:

# %%
missing = f"cuda:{torch.cuda.device_count() + 5}"
try:
    torch.ones(1, device=missing)
except (AssertionError, RuntimeError) as error:
    print(f"{missing}: {type(error).__name__}: {str(error).splitlines()[0]}")
else:
    raise AssertionError(f"{missing} does not exist, but was accepted")

# %% [markdown]
# The sum of two products on two PyTorch devices: one rank on each, and an all-reduce adds up.


# %%
# NBVAL_CHECK_OUTPUT
def torch_sum():
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the rank's own GPU, or its core
    a = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=device)
    b = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    product = a @ b
    dist.all_reduce(product)
    return product.tolist()


totals = launch(torch_sum, 2)
print(totals[0])
assert totals[0] == totals[1] == total_today.numpy().tolist()
print("PyTorch on two ranks equals TensorFlow on two devices:", totals[0] == total_grpc)

# %% [markdown]
# ## Then → now: what the old posts trip over
#
# Each line stands in a post or in the chapter of 2016, and is an error today. The cell runs them all.

# %%
# NBVAL_CHECK_OUTPUT
gpus = tf.config.list_logical_devices("TPU")  # as `gpus` is on a machine without a GPU: empty
slips = {
    "device_lib.list_local_device()": lambda: device_lib.list_local_device(),
    "gpus[0] without a GPU": lambda: gpus[0],
    "np.random.rand(1e4, 1e4)": lambda: np.random.rand(1e4, 1e4),
    "tf.Session()": lambda: tf.Session(),
    "tf.ConfigProto(...)": lambda: tf.ConfigProto(log_device_placement=True),
    "tf.placeholder(...)": lambda: tf.placeholder(tf.float32),
}
for line, run in slips.items():
    try:
        run()
    except (AttributeError, IndexError, TypeError) as error:
        print(f"{line:31} {type(error).__name__}: {error}")
    else:
        raise AssertionError(f"{line} works again: mend the table below")

# %% [markdown]
# | then | now | why |
# |---|---|---|
# | `device_lib.list_local_device()` | `tf.config.list_physical_devices()` | the name was a slip even then: it ends in *devices* |
# | `gpus[0]` in the branch for machines with no GPU | ask `if gpus:` first | an empty list has no first element |
# | `np.random.rand(1e4, 1e4)` | `np.random.rand(10_000, 10_000)` | NumPy takes only integers as sizes |
# | `tf.Session()`, `tf.placeholder()` | call functions directly; `tf.function` compiles them | TensorFlow 2.0 (2019) runs operations at once |
# | `ConfigProto(log_device_placement=True)` | `tf.debugging.set_log_device_placement(True)` | there is no session left to configure |
#
# ## What this machine cannot show
#
# Without a GPU you saw neither TensorFlow's choice of a GPU by default, nor memory growth at work, nor PyTorch's error between a GPU and the CPU. The two results of the 2016 chapter, `[[22, 28], [49, 64]]` and `[[44, 56], [98, 128]]`, you have reproduced, on CPU devices. Results on real GPUs: **not measured** yet.
#
# ## Exercise
#
# [Exercise 01](../exercises/01_device_placement.ipynb): place jobs round-robin, sum products across devices, and turn a placement log into a table. About 25 minutes.
#
# ## Recap
#
# Every result says where it is, with `.device`; a placement log says where every operation ran. `with tf.device(...)` or `.to(...)` decide it; TensorFlow copies between devices on its own, PyTorch does not. Logical devices are names: power comes from a device of its own, such as a process on a core.
#
# 1. A colleague places a layer on `/GPU:3` on a machine with two GPUs. The program runs. Where?
# 2. Why does `tf.config.set_logical_device_configuration` belong at the top of a program?
# 3. You see `MatMul: (MatMul): /job:worker/replica:0/task:1/device:CPU:0`. Which process multiplied?
#
# <details><summary>Answers</summary>
#
# 1. On a device of TensorFlow's choice, because soft placement is on unless it is switched off. Only the log, or `.device`, tells.
# 2. Devices cannot be split once they have started, and already listing the logical ones starts them.
# 3. The one that runs the server of task 1 in the job `worker`, on its device `CPU:0`.
#
# </details>
#
# Go on with [lesson 02, Two devices, one sum](02_two_devices_one_sum.ipynb).
