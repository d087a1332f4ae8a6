"""Meters count what is there, limits bind, and only what is out of memory is called so."""

import errno
import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from course_utils import memory
from course_utils.launch import launch
from course_utils.memory import GiB, KiB, MiB


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mlp(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def train(model, optimizer, batch, width=64):
    x, y = torch.randn(batch, width), torch.randint(0, 10, (batch,))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (1536 * KiB, "1.50 MiB")]
    + [(10.25 * MiB, "10.2 MiB"), (100 * GiB, "100 GiB"), (-2 * MiB, "-2.00 MiB")],
)
def test_size_is_in_powers_of_two(number, text):
    assert memory.size(number) == text


# ---------------------------------------------------------------- counting


def test_storages_are_counted_not_tensors():
    with memory.Budget() as meter:
        x = torch.zeros(256, 1024)
        assert meter.live == MiB
        view = x[0].t()
        assert meter.live == MiB, "a view has no storage of its own"
        copy = x[0].clone()
        assert meter.live == MiB + 4096
        del x
        assert meter.live == MiB + 4096, "a slice keeps its whole storage"
        del view
        assert (meter.live, meter.peak) == (4096, MiB + 4096)
        meter.reset()
        assert meter.peak == 4096
        del copy
    assert meter.live == 0


def test_what_existed_before_the_meter_counts():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 4)
    known = memory.kinds(model, optimizer)
    assert known["optimizer state"] == 2 * known["parameters"] + 4 * 4  # and a step count each
    with memory.Budget(model, {"its": [optimizer]}) as meter:
        assert meter.live == sum(known.values())
        assert {kind: n for kind, n in meter.by_kind().items() if n} == known
    with memory.Budget() as untold:
        assert untold.live == 0
        model(torch.zeros(1, 64))
        assert untold.live >= known["parameters"], "counted when an operation touched them"


def test_kinds_of_a_training_step():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    static = memory.kinds(model)["parameters"]
    with memory.Budget(model, optimizer) as meter:
        x = torch.randn(32, 64)
        hidden = model[1](model[0](x))
        loss = model[2](hidden).sum()
        # Relu keeps its own output; the linear layers' are free again. And the sum: one number.
        assert meter.by_kind()["activations"] == 4 * (32 * 64 + 1)
        assert meter.by_kind()["other"] == x.nbytes
        loss.backward()
        del hidden, loss
        assert (meter.by_kind()["activations"], meter.by_kind()["gradients"]) == (0, static)
        optimizer.step()
        assert meter.by_kind()["optimizer state"] == 2 * static + 16
        assert meter.peak_by_kind()["optimizer state"] > 2 * static
        optimizer.zero_grad()
        assert meter.by_kind()["gradients"] == 0
        assert sum(meter.by_kind().values()) == meter.live
    assert sum(meter.peak_by_kind().values()) == meter.peak


def test_shared_parameters_count_once_and_frozen_ones_have_no_gradient():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    assert memory.kinds(model) == {"parameters": 16 * KiB, "gradients": 0, "optimizer state": 0}
    model = mlp()
    model[0].requires_grad_(False)
    with memory.Budget(model) as meter:
        model(torch.randn(8, 64)).sum().backward()
    assert meter.by_kind()["gradients"] == memory.kinds(model[2])["parameters"]


def test_a_meter_keeps_nothing_alive_and_leaves_no_hook():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone = weakref.ref(model[0].weight)
    with memory.Budget(model, optimizer, limit=GiB, record=True) as meter:
        train(model, optimizer, 4)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    del model, optimizer, parameter
    gc.collect()
    assert gone() is None and meter.live == 0


def test_a_hook_is_gone_also_after_an_error():
    model = mlp()
    with pytest.raises(ZeroDivisionError), memory.Budget(model) as meter:
        1 / 0  # noqa: B018
    assert not model[0].weight._post_accumulate_grad_hooks
    with meter:  # and it can be entered again
        assert meter.by_kind()["parameters"] == memory.kinds(model)["parameters"]


def test_two_meters_count_the_same():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with memory.Budget(model, optimizer) as outer, memory.Budget(model, optimizer) as inner:
        train(model, optimizer, 32)
    assert (outer.live, outer.peak, outer.by_kind()) == (inner.live, inner.peak, inner.by_kind())


def test_replica_threads_each_enter_the_meter():
    def replica(meter, go, results, counted):
        go.wait()
        if counted:
            with meter:
                results.append(torch.ones(MiB // 4))
        else:
            results.append(torch.ones(MiB // 4))

    for counted in (True, False):
        results, go = [], threading.Barrier(2)
        with memory.Budget() as meter:
            threads = [
                threading.Thread(target=replica, args=(meter, go, results, counted))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            # A dispatch mode belongs to its thread: without entering it, nothing is seen.
            assert meter.live == (2 * MiB if counted else 0)
            torch.ones(1)
            assert meter.peak == (2 * MiB if counted else 0) + 4


@pytest.mark.parametrize("bad", [0, -1])
def test_a_limit_is_positive(bad):
    with pytest.raises(ValueError, match="64 \\* MiB"):
        memory.meter(limit=bad)


def test_only_what_has_tensors_is_tracked():
    with pytest.raises(TypeError, match="not str"):
        memory.Budget([mlp(), "model"])


def test_autocast_is_counted():
    model = mlp()
    with memory.Budget(model) as meter, torch.autocast("cpu", dtype=torch.bfloat16):
        out = model[0](torch.randn(32, 64))
        assert out.dtype == torch.bfloat16
        # the output, and the weights' bfloat16 copies, which autocast caches
        assert meter.by_kind()["activations"] >= 2 * 32 * 64 + 2 * 64 * 64


# ---------------------------------------------------------------- the limit


def test_the_limit_binds_and_says_where_the_bytes_are():
    model = mlp()
    with memory.meter(model, limit=MiB) as meter:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(MiB)
        assert memory.is_oom(caught.value)
        text = str(caught.value)
        for words in ("Tried to allocate 4.00 MiB", "of 1.00 MiB", "parameters 18.8 KiB"):
            assert words in text, text
        assert meter.peak <= MiB
        assert meter.live == memory.kinds(model)["parameters"]
        half = torch.zeros(MiB // 8)  # what fits, fits
        del half


def test_the_limit_is_reached_exactly():
    with memory.Budget(limit=MiB) as meter:
        x = torch.zeros(MiB // 4)
        assert meter.live == meter.limit == MiB
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
        del x


def test_a_failed_operation_leaves_its_result_to_nobody():
    """The error's traceback must not hold the storage that did not fit."""
    odd = 4 * MiB + 4  # bytes that nobody else has
    with memory.Budget(limit=MiB), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.ones(odd // 4)
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    assert not [each for each in alive if each.nbytes == odd]
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_hundred_failures_leave_nothing(where):
    model = mlp(256)
    optimizer = torch.optim.Adam(model.parameters())
    static = memory.kinds(model)["parameters"]
    forward_only = 1 if where == "forward" else 0
    room = {"forward": static + 100 * KiB, "backward": 2 * static, "step": 3 * static}[where]
    batch = 256 if forward_only else 16
    with memory.Budget(model, optimizer, limit=room) as meter:
        for _ in range(100):
            failed_in = ""
            try:
                x, y = torch.randn(batch, 256), torch.randint(0, 10, (batch,))
                failed_in = "forward"
                loss = nn.functional.cross_entropy(model(x), y)
                failed_in = "backward"
                loss.backward()
                failed_in = "step"
                optimizer.step()
            except torch.OutOfMemoryError:
                pass
            else:
                pytest.fail("it fitted")
            assert failed_in in (where, "")
            optimizer.zero_grad()
            optimizer.state.clear()
            x = y = loss = None
        assert meter.peak <= room
        assert meter.live == static
        x = torch.zeros(8)
        assert meter.by_kind()["other"] == x.nbytes, "no optimizer steps any more"


def test_the_same_run_counts_the_same_every_time():
    peaks = set()
    for _ in range(3):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        with memory.Budget(model, optimizer) as meter:
            train(model, optimizer, 33)
            train(model, optimizer, 33)
        peaks.add((meter.peak, meter.live))
    assert len(peaks) == 1


# ---------------------------------------------------------------- prediction


MODELS = {
    "mlp": (mlp, (64,)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(), nn.Linear(8 * 49, 10),
        ),
        (3, 16, 16),
    ),
    "transformer": (
        lambda: nn.Sequential(
            # copies its layer, also when tensors are fake
            nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
            nn.Flatten(), nn.Linear(320, 10),
        ),
        (10, 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adam])
def test_a_prediction_is_what_the_budget_counts(name, optimizer_type):
    build, shape = MODELS[name]

    def run(meter):
        model = build()
        optimizer = optimizer_type(model.parameters(), lr=0.1)
        meter.track(model, optimizer)
        figures = []
        for batch in (4, 32):
            meter.reset()
            x, y = torch.zeros(batch, *shape), torch.zeros(batch, dtype=torch.long)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            del x, y
            figures += [meter.peak, meter.live]
        return figures

    with memory.Fake() as fake:
        predicted = run(fake)
    with memory.Budget() as real:
        measured = run(real)
    assert predicted == pytest.approx(measured, rel=0.02)
    assert predicted[3] == measured[3]
    assert str(fake).startswith("Prediction")


def test_a_model_far_too_big_is_predicted():
    with memory.Fake() as meter:
        model = nn.Sequential(*[nn.Linear(50_000, 50_000, bias=False) for _ in range(10)])
        meter.track(model)
        model(torch.zeros(2, 50_000)).sum().backward()
    assert meter.by_kind()["parameters"] == meter.by_kind()["gradients"] == 10**11
    with memory.Fake(limit=GiB), pytest.raises(torch.OutOfMemoryError, match="37.3 GiB"):
        torch.zeros(100_000, 100_000)


# ---------------------------------------------------------------- sharded training


def sharded_steps():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def truth():
        """Bytes of every storage that any tensor of this process refers to."""
        gc.collect()
        sizes = {}
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor) and not hasattr(each, "__tensor_flatten__"):
                sizes[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
        return sum(sizes.values())

    mesh = init_device_mesh("cpu", (2,))
    before = truth()
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(2, 512)
    with memory.meter(model, optimizer, x) as meter, torch.no_grad():
        model(x)
        first = meter.peak  # before anything has shown the meter that storages are resized
        meter.reset()
        model(x)
        peaks = first, meter.peak

    def look():
        """Counted and true; gloo's own thread lets go of a buffer a little after its work."""
        until = time.monotonic() + 10
        while (pair := (meter.live, truth() - before))[0] != pair[1] and time.monotonic() < until:
            time.sleep(0.01)
        return pair

    rows = []
    with memory.meter(model, optimizer, x) as meter:
        for _ in range(2):
            loss = model(x).sum()
            rows.append(look())
            loss.backward()
            rows.append(look())
            optimizer.step()
            optimizer.zero_grad()
            del loss
            rows.append(look())
    return rows, peaks


def test_sharded_storages_are_resized_behind_the_dispatcher_and_still_right():
    for rows, (first, second) in launch(sharded_steps, 2):
        for counted, true in rows:
            assert counted == true
        assert first == pytest.approx(second, rel=0.01)


# ---------------------------------------------------------------- what counts as out of memory


class ResourceExhaustedError(Exception):
    """Named as TensorFlow's; the real one is raised in tests/test_keras_batch.py."""


OOM = [
    torch.OutOfMemoryError("anything"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ResourceExhaustedError("OOM when allocating tensor with shape[1000,1000]"),
    ResourceExhaustedError("{{function_node}} failed to allocate memory [Op:Mul]"),
    *map(
        RuntimeError,
        [
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.77 GiB total capacity)",
            "HIP out of memory. Tried to allocate 2.00 GiB",
            "XPU out of memory. Tried to allocate 2.00 GiB",
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
            "CUDA driver error: out of memory",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED",
            "cuFFT error: CUFFT_ALLOC_FAILED",
            "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4503599627370496 bytes. Error code 12",
            "[enforce fail at alloc_cpu.cpp:82] data. DefaultCPUAllocator: not enough memory: "
            "you tried to allocate 2097152 bytes.",
            "MPS backend out of memory (MPS allocated: 17.93 GB, other allocations: 1 GB)",
            "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
            "std::bad_alloc",
            "unable to mmap 1048576 bytes from file </tmp/x>: Cannot allocate memory (12)",
        ],
    ),
]
NOT_OOM = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: misaligned address"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
    RuntimeError("memory format option is only supported by strided tensors"),
    ValueError("CUDA out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    ResourceExhaustedError("Received message larger than max (8388608 vs. 4194304)"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OOM, ids=lambda error: repr(error)[:60])
def test_out_of_memory_is_recognised(error):
    assert memory.is_oom(error)


@pytest.mark.parametrize("error", NOT_OOM, ids=lambda error: repr(error)[:60])
def test_other_errors_are_not(error):
    assert not memory.is_oom(error)


def test_the_real_allocators_are_recognised():
    for demand in (lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            demand()
        assert memory.is_oom(caught.value)


def test_peers_recognise_the_budget():
    from accelerate.utils.memory import should_reduce_batch_size
    from pytorch_lightning.utilities.memory import is_oom_error
    from toma import torch_cuda_memory
    from toma.cpu_memory import is_out_of_cpu_memory

    assert torch_cuda_memory  # the module that asks the other
    with memory.Budget(limit=MiB), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(MiB)
    for peer in (should_reduce_batch_size, is_oom_error, is_out_of_cpu_memory):
        assert peer(caught.value)


REAL = """
    import gc, resource, torch
    from course_utils import memory
    from course_utils.memory import MiB

    def step(n):
        x = torch.ones(n, MiB // 4, requires_grad=True)
        (x * 2).sum().backward()

    step(1)  # threads and libraries start before the limit binds
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    used = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + 300 * MiB, resource.RLIM_INFINITY))
    for _ in range(20):
        failed = ""
        try:
            step(400)
        except Exception as error:
            assert memory.is_oom(error), repr(error)
            failed = f"{type(error).__name__}: {error}"
        assert failed, "400 MiB fitted into 300"
        memory.release()
        step(20)  # and what fits still runs
    print(failed)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA binds allocations on Linux only")
def test_a_genuine_allocator_failure_is_recognised_and_survived():
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL)], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    assert "RuntimeError: [enforce fail at alloc_cpu" in child.stdout


def test_release_frees_what_only_a_cycle_holds():
    with memory.Budget() as meter:
        gc.disable()
        try:
            cycle = {"x": torch.zeros(KiB)}
            cycle["self"] = cycle
            del cycle
            assert meter.live == 4096
            memory.release()
            assert meter.live == 0
        finally:
            gc.enable()


# ---------------------------------------------------------------- what people see


def test_the_table_and_the_figure():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with memory.meter(model, optimizer, limit=8 * MiB, record=True) as meter:
        meter.mark("first step")
        train(model, optimizer, 256)
    table = str(meter)
    assert "limit 8.00 MiB" in table and "optimizer state" in table
    figure = meter.figure()
    (axes,) = figure.axes
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [*meter.by_kind(), "limit"]
    assert "at the peak" in axes.get_title() and "MiB" in axes.get_ylabel()
    assert [text.get_text().strip() for text in axes.texts] == ["first step"]
    tops = [patch.get_datalim(axes.transData).y1 for patch in axes.collections]
    assert max(tops) == pytest.approx(meter.peak / MiB)


def test_no_figure_without_a_record():
    with memory.Budget() as meter:
        torch.zeros(3)
    with pytest.raises(ValueError, match="record=True"):
        meter.figure()


# ---------------------------------------------------------------- a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's allocator needs a GPU")
def test_cuda_counts_and_limits():
    model = mlp(512).cuda()
    with memory.meter(model, limit=GiB) as meter:
        assert isinstance(meter, memory.Cuda)
        meter.reset()
        x = torch.randn(1024, 512, device="cuda")
        model(x).sum().backward()
        assert meter.live == torch.cuda.memory_allocated()
        counted = sum(meter.peak_by_kind().values())
        assert counted == pytest.approx(meter.peak, rel=0.05)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(GiB, device="cuda")
        assert memory.is_oom(caught.value)
