"""Right answers in other styles than the solution's get all their points."""

import pytest
from test_tasks import findings_of

from course_utils.grading import get_task
from course_utils.grading.tasks import lesson_15

RIGHT = {
    "15-evaluate": (
        "adds up in a float32 tensor",
        """
import torch
def evaluate(model, batches, loss_fn):
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    total, samples = torch.tensor(0.0), 0
    try:
        with torch.no_grad():
            for b in batches:
                total += loss_fn(model, b) * len(b)
                samples += len(b)
    finally:
        for m, mode in modes:
            m.training = mode
    return (total / samples).item()
""",
    ),
    "15-leaks": (
        "adds up in a float32 tensor, without the graph",
        """
import torch
def total_loss(loss_of, batches):
    return torch.tensor([loss_of(each).item() for each in batches]).sum().item()
"""
        + "".join(source for name, source in lesson_15._MENDED.items() if name != "total_loss"),
    ),
    "16-accumulate": (
        "one pass for the mean, one for the gradient",
        """
import torch
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    parts = [(x[i:i + micro], y[i:i + micro]) for i in range(0, len(x), micro)]
    parts = [(part, count(part) / count(batch)) for part in parts if count(part)]
    with torch.no_grad():
        mean = sum(loss_fn(model, part).item() * share for part, share in parts)
    for part, share in parts:
        (loss_fn(model, part) * share).backward()
    return mean
""",
    ),
    "04-ring": (
        "pads the numbers, so that all chunks are equal",
        """
import torch
def ring_all_reduce(numbers, rank, ranks, send, receive):
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % ranks))
    chunks = list(padded.chunk(ranks))
    for s in range(2 * (ranks - 1)):
        send(chunks[(rank - s) % ranks], (rank + 1) % ranks)
        arrived, i = receive((rank - 1) % ranks), (rank - s - 1) % ranks
        chunks[i] = chunks[i] + arrived if s < ranks - 1 else arrived
    return torch.cat(chunks)[:len(numbers)]
""",
    ),
    "11-newest": (
        "asks the zip first, and loads what looks whole",
        """
import os, re, zipfile
def newest(folder, load):
    found = [re.fullmatch(r"ckpt-(\\d+)\\.keras", name) for name in os.listdir(folder)]
    for epoch in sorted((int(m[1]) for m in found if m), reverse=True):
        path = os.path.join(folder, f"ckpt-{epoch}.keras")
        if not zipfile.is_zipfile(path):
            continue
        try:
            return epoch, load(path)
        except Exception as error:
            print(epoch, error)
""",
    ),
    "11-resume": (
        "TensorFlow's own checkpoints, whose names it keeps in the folder",
        """
import keras, tensorflow as tf
def train(make_model, x, y, epochs, folder, callbacks):
    model, done = make_model(), tf.Variable(0)
    model.optimizer.build(model.trainable_variables)
    everything = tf.train.Checkpoint(model=model, optimizer=model.optimizer, done=done)
    manager = tf.train.CheckpointManager(everything, folder, max_to_keep=2)
    everything.restore(manager.latest_checkpoint)
    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            done.assign(epoch + 1)
            manager.save()
    model.fit(x, y, epochs=epochs, initial_epoch=int(done), shuffle=False, verbose=0,
              callbacks=[*callbacks, Save()])
    return model
""",
    ),
    "11-pipeline": (
        "with options, at the end",
        """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto, options = tf.data.AUTOTUNE, tf.data.Options()
    options.deterministic = False
    pictures = files.map(decode, num_parallel_calls=auto).cache().shuffle(number)
    changed = pictures.map(augment, num_parallel_calls=auto).batch(local * replicas)
    return changed.prefetch(auto).with_options(options)
""",
    ),
    "09-shards": (
        "asks a shape for its numel()",
        """
import torch
def shard(parameters, rank, n):
    flats = []
    for p in parameters:
        height = -(-p.shape[0] // n)
        whole = torch.cat([p, p.new_zeros(height * n - p.shape[0], *p.shape[1:])])
        flats.append(whole[rank * height:(rank + 1) * height].flatten())
    return torch.cat(flats)
def unshard(flats, shapes):
    n, start, wholes = len(flats), 0, []
    for shape in shapes:
        length = -(-shape[0] // n) * (shape.numel() // shape[0])
        together = torch.cat([flat[start:start + length] for flat in flats])
        wholes.append(together[:shape.numel()].view(shape))
        start += length
    return wholes
""",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_in_another_style_gets_everything(name):
    task, (style, source) = get_task(name), RIGHT[name]
    found = findings_of(task, source, seed=2026)
    assert [finding.why for finding in found if finding.why] == [], style
