"""The real load: clients of the SDK, out of step, through ``descant serve``, beside the same work in lockstep.

    python bench/load.py [--clients N [N ...]] [--shape smollm2 | DIRECTORY | qwen3-0.6b ...] [--seconds S]
                         [--samples 8] [--tokens 64] [--think 0.05] [--warm-up 2] [--set KEY=VALUE] [--json FILE]
                         [--quick]

Each client has an API key, an adapter (ranks go round) and a loop of its own: it samples (``--samples`` of ``--tokens``
on average, after prompts of other lengths), trains (``forward_backward`` and ``optim_step``), publishes
(``save_weights_and_get_sampling_client``) and thinks. Three of four reinforce what they sampled
(``importance_sampling``), the fourth learns texts (``cross_entropy``). They run in a few processes. What they send is
drawn from seeds; who meets whom is not.

A window of ``--seconds`` begins when every client has made ``--warm-up`` steps, and is full until its end. A call that
crosses an edge of it counts by its share. The floor is the same work in lockstep, by a rank's worker in a process of
its own, before and after the window: all clients' samples as one batch, all training packed, one optimiser turn, one
turn that publishes. It knows no HTTP, no queue and no thinking.

    load_vs_lockstep             lockstep's seconds for the work of the window, by the window's seconds
    load_vs_lockstep_own_passes  on a CPU: lockstep where, as in the server there, each request has passes of its own
    first_step_ratio             the first step of new clients, all at once, by the median of later steps
    token_interval               a sample's time by its tokens. The SDK does not stream: gaps cannot be seen from here
    lockstep_drift               lockstep after the window by lockstep before it: far from 1, others use the machine
    other_cores                  processor seconds a second of everybody else on the machine
    device_busy                  share of the samples in which NVML saw a kernel run; None without pynvml or a GPU

Rows are ``{id, what, value, baseline, ratio}``, with ``@N`` for the number of clients; a baseline is lockstep's where
there is one. The exit status is 1 if a client had an error.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from descant.demo import RunningServer, running_server
from descant.errors import DescantError

RANKS = (8, 32, 16, 4)
LONGEST_WAIT_S = 600.0
"""For a call, for everybody's warm-up, for a lockstep round."""
KINDS = ("sample", "forward_backward", "optim_step", "save")
LEARNING_RATE = 1e-5
QUICK = {"clients": [4], "seconds": 20.0, "samples": 4, "tokens": 16}
FULL = {"clients": [8], "seconds": 60.0, "samples": 8, "tokens": 64}


# --------------------------------------------------------------------------------------------------------------------
# The work


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of a client's step. ``texts``: what it learns; None: what it sampled. ``think``: seconds before the next step."""

    prompt: list[int]
    max_tokens: int
    texts: list[list[int]] | None
    think: float


def work_of(options: argparse.Namespace, text: Sequence[int], number: int, step: int) -> Work:
    """A function of seeds alone. ``text``: tokens that prompts and texts are cut from."""
    random = np.random.default_rng([number, step])
    tokens = options.tokens

    def cut(low: int, high: int) -> list[int]:
        start, length = int(random.integers(len(text))), int(random.integers(low, high + 1))
        return [text[(start + i) % len(text)] for i in range(length)]

    prompt = cut(max(2, tokens // 4), 3 * tokens // 2)
    max_tokens = int(random.choice([3 * tokens // 4, tokens, 5 * tokens // 4]))
    learns = number % 4 == 3
    texts = [cut(max(2, tokens // 2), 3 * tokens) for _ in range(options.samples)] if learns else None
    return Work(prompt=prompt, max_tokens=max_tokens, texts=texts, think=float(random.uniform(0, 2 * options.think)))


Arrays = tuple[list[int], dict[str, np.ndarray]]
"""A datum: its tokens, and its loss's inputs."""


def training_data(work: Work, samples: Sequence[tuple[Sequence[int], Sequence[float]]]) -> tuple[list[Arrays], str]:
    """And the loss. ``samples``: tokens and log-probabilities."""
    if work.texts is not None:
        return [(text[:-1], {"target_tokens": np.array(text[1:], np.int64)}) for text in work.texts], "cross_entropy"
    data, ahead = [], len(work.prompt) - 1
    advantages = np.random.default_rng(work.prompt).normal(size=len(samples))
    for (tokens, logprobs), advantage in zip(samples, advantages - advantages.mean(), strict=True):
        stream, padding = [*work.prompt, *tokens], [0.0] * ahead
        arrays = {
            "target_tokens": np.array(stream[1:], np.int64),
            "logprobs": np.array([*padding, *logprobs], np.float32),
            "advantages": np.array([*padding, *[advantage] * len(tokens)], np.float32),
        }
        data.append((stream[:-1], arrays))
    return data, "importance_sampling"


# --------------------------------------------------------------------------------------------------------------------
# The clients, in a few processes


class Call(NamedTuple):
    client: int
    step: int
    kind: str
    began: float
    ended: float
    tokens: int
    """That were sampled, of all samples; or trained."""
    interval: float
    """Seconds for each token of a sample; 0 of other calls."""

    def share(self, start: float, end: float) -> float:
        """Of the call, by its time, what lies in the window."""
        return max(0.0, min(end, self.ended) - max(start, self.began)) / max(1e-9, self.ended - self.began)


class Phase:
    """What all processes know of the measurement that runs: who has warmed up, when the window ends, and who has ended
    the call that he was in then. Until everybody has, nobody stops: the window is full to its end."""

    def __init__(self, context: Any):
        self.warm, self.crossed, self.total = (context.Value("i", 0) for _ in range(3))
        self.end = context.Value("d", math.inf)

    def begin(self, total: int) -> None:
        self.warm.value, self.crossed.value, self.total.value, self.end.value = 0, 0, total, math.inf

    @staticmethod
    def count(value: Any) -> None:
        with value.get_lock():
            value.value += 1

    @property
    def over(self) -> bool:
        return self.crossed.value >= self.total.value


class Client:
    def __init__(self, number: int, url: str, options: argparse.Namespace, text: Sequence[int]):
        import tinker

        self.number, self.options, self.text, self.steps = number, options, text, 0
        account: Any = {"base_url": url, "api_key": f"tml-load-{number:04}"}
        capabilities = tinker.RestClient(**account).get_server_capabilities().result(LONGEST_WAIT_S)
        base = capabilities.supported_models[0].model_name
        rank = RANKS[number % len(RANKS)]
        self.training = (
            tinker.ServiceClient(**account)
            .create_lora_training_client(base, rank=rank, seed=number)
            .result(LONGEST_WAIT_S)
        )
        self.sampling = self.training.save_weights_and_get_sampling_client().result(LONGEST_WAIT_S)

    def run(self, phase: Phase) -> list[Call]:
        calls: list[Call] = []
        first, crossed = self.steps, False
        time.sleep(float(np.random.default_rng([self.number, 0xD]).uniform(0, 0.5)))
        while True:
            for call in self._step():
                calls.append(call)
                if not crossed and call.ended > phase.end.value:
                    crossed = True
                    phase.count(phase.crossed)
                if phase.over:
                    return calls
            self.steps += 1
            if self.steps - first == self.options.warm_up:
                phase.count(phase.warm)

    def _step(self) -> Iterator[Call]:
        from tinker import types

        work = work_of(self.options, self.text, self.number, self.steps)
        made = functools.partial(Call, self.number, self.steps)
        began = time.monotonic()
        params = types.SamplingParams(max_tokens=work.max_tokens, temperature=1.0, stop=[])
        prompt = types.ModelInput.from_ints(work.prompt)
        sequences = self.sampling.sample(prompt, self.options.samples, params).result(LONGEST_WAIT_S).sequences
        ended = time.monotonic()
        samples = [(list(sequence.tokens), list(sequence.logprobs or [])) for sequence in sequences]
        for tokens, logprobs in samples:
            if len(tokens) != work.max_tokens or len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
                raise RuntimeError(f"a sample of {len(tokens)} tokens, expected {work.max_tokens}: {logprobs}")
        sampled = sum(len(tokens) for tokens, _ in samples)
        yield made("sample", began, ended, sampled, (ended - began) / work.max_tokens)

        data, loss = training_data(work, samples)
        datums = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens),
                loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in arrays.items()},
            )
            for tokens, arrays in data
        ]
        began = time.monotonic()
        backward = self.training.forward_backward(datums, loss)  # type: ignore[arg-type]
        update = self.training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        result = backward.result(LONGEST_WAIT_S)
        middle = time.monotonic()
        if not math.isfinite(result.metrics["loss:sum"]):
            raise RuntimeError(f"a loss of {result.metrics['loss:sum']}")
        yield made("forward_backward", began, middle, sum(len(tokens) for tokens, _ in data), 0.0)
        update.result(LONGEST_WAIT_S)
        ended = time.monotonic()
        yield made("optim_step", middle, ended, 0, 0.0)
        self.sampling = self.training.save_weights_and_get_sampling_client().result(LONGEST_WAIT_S)
        yield made("save", ended, time.monotonic(), 0, 0.0)
        time.sleep(work.think)


def run_clients(
    connection: Connection, phase: Phase, url: str, options: argparse.Namespace, text: Sequence[int]
) -> None:
    """A process of clients: for the numbers that it is sent, it sends the calls that each has made, or why not."""
    clients: dict[int, Client] = {}
    sending = threading.Lock()

    def run(number: int) -> None:
        try:
            if number not in clients:
                clients[number] = Client(number, url, options, text)
            answer: list[Call] | str = clients[number].run(phase)
        except Exception:
            answer = f"client {number}: {traceback.format_exc()}"
        with sending:
            connection.send(answer)

    while True:
        try:
            numbers = connection.recv()
        except EOFError:
            return
        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# --------------------------------------------------------------------------------------------------------------------
# The floor: a rank's worker, in a process of its own


class Lockstep:
    def __init__(self, directory: str, options: argparse.Namespace, text: Sequence[int]):
        from descant.config import load_settings
        from descant.ranks.peers import Peers
        from descant.ranks.settings import RankSpec
        from descant.ranks.worker import build

        settings = load_settings(overrides=options.set).replica
        self.worker = build(RankSpec(model=directory, settings=settings), lambda phase: None, Peers())
        self.scheduler = self.worker.make_scheduler()
        self.options, self.text, self.rounds = options, text, 0
        self.warm = 0
        """The number of clients of the last warm-up."""
        self.versions: dict[str, Any] = {}
        """By model."""

    def measure(self, count: int, seconds: float) -> dict[str, float]:
        """Seconds of so many clients' rounds by part, and what they computed: ``sampled`` and ``trained`` tokens,
        ``steps``. One round at least."""
        self._create(count)
        # On a GPU other sizes are compiled and captured; on a CPU a processor's caches are all there is to warm.
        if not self.warm or (self.worker.model.device.type == "cuda" and self.warm != count):
            self._round(count)
            self.warm = count
        total: dict[str, float] = {}
        began = time.perf_counter()
        while not total or time.perf_counter() - began < seconds:
            for name, value in self._round(count).items():
                total[name] = total.get(name, 0.0) + value
        return {**total, "linear": self._linear(total)}

    def _linear(self, total: Mapping[str, float]) -> float:
        """Seconds of the linear layers' products alone for these rounds' tokens, by one round of the mean size."""
        from descant.bench import linear_products

        network, tokens = self.worker.model.network, self.options.tokens
        rounds = total["rounds"]
        decode = linear_products(network, round(total["sampled"] / rounds / tokens), backward=False)
        train = linear_products(network, round(total["computed"] / rounds), backward=True)
        found: dict[str, float] = {}
        self._timed(found, "round", lambda: ([decode() for _ in range(tokens)], train()))
        return rounds * found["round"]

    def _create(self, count: int) -> None:
        from descant.types import CreateModel, Lora

        for number in range(len(self.versions), count):
            name, lora = f"lockstep-{number}", Lora(rank=RANKS[number % len(RANKS)], seed=number)
            self._rows([CreateModel(model_id=name, trainable=lora)])
            self._publish([name])

    def _rows(self, commands: Sequence[Any]) -> list[Any]:
        from descant.ranks.ops import Rows

        return _results(self.worker.execute(Rows(commands=tuple(commands))))

    def _publish(self, names: Sequence[str]) -> None:
        from descant.ranks.ops import Publish, Release
        from descant.types import Snapshot

        take = functools.partial(Snapshot, seq_id=self.rounds, kind="sampler", for_disk=False, to_publish=True)
        for name, ref in zip(names, self._rows([take(model_id=name) for name in names]), strict=True):
            self.worker.execute(Publish(ref=ref))
            if name in self.versions:
                self.worker.execute(Release(version=self.versions[name]))
            self.versions[name] = ref.version

    def _round(self, count: int) -> dict[str, float]:
        from descant.types import AdamParams, OptimStep

        self.rounds += 1
        works = [work_of(self.options, self.text, number, self.rounds) for number in range(count)]
        names = list(self.versions)[:count]
        found: dict[str, float] = {"rounds": 1, "steps": count}
        samples = self._timed(found, "sample", lambda: self._sample(names, works))
        data = [training_data(work, samples[name]) for name, work in zip(names, works, strict=True)]
        found["sampled"] = sum(len(tokens) for of_one in samples.values() for tokens, _ in of_one)
        found["trained"] = sum(len(tokens) for of_one, _ in data for tokens, _ in of_one)
        params = AdamParams(learning_rate=LEARNING_RATE)
        steps = [OptimStep(model_id=name, seq_id=self.rounds, adam_params=params) for name in names]
        if self.worker.info.piece_tokens is not None:
            self._timed(found, "forward_backward, own passes", lambda: self._train(names, data, packed=False))
            self._rows(steps)
        found["computed"] = self._timed(found, "forward_backward", lambda: self._train(names, data, packed=True))
        self._timed(found, "optim_step", lambda: self._rows(steps))
        self._timed(found, "save", lambda: self._publish(names))
        return found

    def _timed(self, found: dict[str, float], name: str, run: Callable[[], Any]) -> Any:
        import torch

        began = time.perf_counter()
        result = run()
        if self.worker.model.device.type == "cuda":
            torch.cuda.synchronize()
        found[name] = time.perf_counter() - began
        return result

    def _sample(self, names: Sequence[str], works: Sequence[Work]) -> dict[str, list[tuple[list[int], list[float]]]]:
        """One batch; everybody asks for the mean number of tokens, so that it stays full until its end."""
        from descant.ranks.ops import Pin, SampleStep, Unpin
        from descant.types import EncodedText, SampleRequest, SamplingParams

        for name, work in zip(names, works, strict=True):
            self.worker.execute(Pin(version=self.versions[name]))
            request = SampleRequest(
                request_id=name,
                version=self.versions[name],
                prompt=(EncodedText(tokens=np.array(work.prompt, np.int32)),),
                num_samples=self.options.samples,
                sampling_params=SamplingParams(max_tokens=self.options.tokens, seed=self.rounds, stop=()),
                owner=name,
                prefix_scope=name,
            )
            self.scheduler.add(request)
        samples: dict[str, list[tuple[list[int], list[float]]]] = {name: [] for name in names}
        while (plan := self.scheduler.plan()) is not None:
            [outputs] = self.worker.execute(SampleStep(plans=(plan,)))
            if isinstance(outputs, Exception):
                raise outputs
            for delta in self.scheduler.apply(plan, outputs):
                samples[delta.request_id].append((delta.tokens.tolist(), delta.logprobs.tolist()))
        for name in names:
            self.worker.execute(Unpin(version=self.versions[name]))
        return samples

    def _train(self, names: Sequence[str], data: Sequence[tuple[list[Arrays], str]], *, packed: bool) -> float:
        """One turn of passes of ``microbatch_tokens``; ``packed``: whatever fits, else of one request each. The tokens
        that were computed: what datums of a request begin with in common counts once."""
        from descant.ranks.ops import Microbatch
        from descant.train.runner import Part
        from descant.types import Datum, EncodedText, ForwardBackward

        commands, passes, room = [], [], 0
        for name, (of_one, loss) in zip(names, data, strict=True):
            datums = [
                Datum(model_input=(EncodedText(tokens=np.array(tokens, np.int32)),), loss_fn_inputs=arrays)
                for tokens, arrays in of_one
            ]
            seq_id = 2 * self.rounds + packed
            commands.append(ForwardBackward(model_id=name, seq_id=seq_id, data=tuple(datums), loss_fn=loss))
            if not packed:
                room = 0
            for index, (tokens, _) in enumerate(of_one):
                if len(tokens) > room:
                    passes.append([])
                    room = self.worker.info.microbatch_tokens
                passes[-1].append(Part(request=(name, seq_id), datum=index))
                room -= len(tokens)
        turn = Microbatch(
            opens=tuple(commands),
            shares=(tuple(map(tuple, passes)),),
            closes=tuple((command.model_id, command.seq_id) for command in commands),
        )
        outputs = _results(self.worker.execute(turn))
        return sum(output.metrics["tokens_computed:sum"] for output in outputs)


def _results(outcomes: Sequence[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome.result, Exception):
            raise outcome.result
    return [outcome.result for outcome in outcomes]


def run_lockstep(connection: Connection, options: argparse.Namespace, scratch: str) -> None:
    """Sends what to serve and the text's tokens; once told to, loads it, and sends what each measurement found."""
    from descant.ranks.rank_main import rank_environment

    os.environ.update(rank_environment({}))  # before torch is there, as in a rank
    import torch
    import transformers
    from workload import TEXT

    from descant.model.load import resolve_model
    from descant.testing.shapes import SHAPES, shaped_model

    transformers.utils.logging.disable_progress_bar()
    try:
        if options.shape in SHAPES:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            directory = shaped_model(options.shape, Path(scratch), device=device)
        else:
            directory = resolve_model(options.shape).directory
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        text = tokenizer(TEXT, add_special_tokens=False, verbose=False)["input_ids"]
        on_gpu = torch.cuda.is_available()
        card = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
        if on_gpu:
            torch.cuda.empty_cache()
        connection.send({"directory": str(directory), "text": text, "device": card, "torch": torch.__version__})
        connection.recv()
        lockstep = Lockstep(str(directory), options, text)
        connection.send(str(lockstep.worker.model.dtype).removeprefix("torch."))
        while True:
            connection.send(lockstep.measure(*connection.recv()))
    except EOFError:
        pass
    except BaseException:
        connection.send(f"lockstep: {traceback.format_exc()}")


# --------------------------------------------------------------------------------------------------------------------
# What the machine does meanwhile


class Device:
    """The first GPU, by NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        if importlib.util.find_spec("pynvml") is not None:
            import pynvml

            try:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
                self._nvml = pynvml
            except pynvml.NVMLError:
                pass

    def busy(self) -> float | None:
        return None if self._nvml is None else self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100


def rank_processes(server: int) -> list[int]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (directory / "stat").read_text(), (directory / "cmdline").read_bytes()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == server and b"descant.ranks.rank_main" in command:
            found.append(int(directory.name))
    return found


def cpu_seconds(processes: Sequence[int]) -> float:
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """Of everybody on this machine."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait


def server_numbers(url: str) -> dict[str, float]:
    """What ``/metrics`` says."""
    request = urllib.request.Request(f"{url}/metrics", headers={"X-API-Key": "tml-load-metrics"})
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line for line in response.read().decode().splitlines() if line and not line.startswith("#")]
    return {line.partition("{")[0].removeprefix("descant_"): float(line.rpartition(" ")[2]) for line in lines}


# --------------------------------------------------------------------------------------------------------------------
# The measurement


class LoadError(Exception):
    """Of a client, of the floor, or of time."""


def answer(connection: Connection) -> Any:
    if not connection.poll(LONGEST_WAIT_S):
        raise LoadError(f"no answer after {LONGEST_WAIT_S:.0f} s")
    try:
        found = connection.recv()
    except EOFError:
        raise LoadError("a process of the measurement ended") from None
    if isinstance(found, str) and "Traceback" in found:
        raise LoadError(found)
    return found


@dataclass(kw_only=True)
class Window:
    """What was seen of one number of clients."""

    clients: int
    calls: list[Call]
    start: float
    end: float
    busy: list[float]
    cores: Mapping[str, float]
    numbers: Mapping[str, float]
    new: Sequence[int]
    """Clients that made their first step for it."""
    floors: Sequence[dict[str, float]] = ()
    """Of lockstep, before and after."""

    def shares(self, kind: str) -> list[tuple[Call, float]]:
        found = [(call, call.share(self.start, self.end)) for call in self.calls if call.kind == kind]
        return [(call, share) for call, share in found if share > 0]

    def steps(self) -> dict[tuple[int, int], float]:
        """Seconds of each whole step, thinking left out, by (client, step)."""
        parts: dict[tuple[int, int], list[Call]] = {}
        for call in self.calls:
            parts.setdefault((call.client, call.step), []).append(call)
        return {key: of[-1].ended - of[0].began for key, of in parts.items() if len(of) == len(KINDS)}


class Load:
    """A server, processes of clients, and the floor's process."""

    def __init__(self, stack: ExitStack, options: argparse.Namespace):
        self.options = options
        self._stack, self._context = stack, multiprocessing.get_context("spawn")
        self._device, self._phase = Device(), Phase(self._context)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="descant-load-"))
        model = Path(scratch, "model")
        model.mkdir()
        self._floor = self._process(run_lockstep, options, str(model))
        self.facts = answer(self._floor)
        has_gpu = not self.facts["device"].startswith("CPU")
        if has_gpu:  # where there are cores enough, and a minute is worth something
            self._floor.send("load")
        began = time.monotonic()
        self._server: RunningServer = stack.enter_context(
            running_server(self.facts["directory"], Path(scratch), options.set)
        )
        self.start_s = time.monotonic() - began
        self._ranks = rank_processes(self._server.pid)
        if not has_gpu:
            self._floor.send("load")
        self.facts["dtype"] = answer(self._floor)
        arguments = (self._phase, self._server.url, options, self.facts["text"])
        count = min(4, os.cpu_count() or 1, max(options.clients))
        self._clients = [self._process(run_clients, *arguments) for _ in range(count)]
        self._known = 0
        """How many clients there have been."""

    def _process(self, run: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=run, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        for end in (process.kill, functools.partial(process.join, 10), ours.close):  # the last comes first
            self._stack.callback(end)
        return ours

    def measure(self, count: int) -> Window:
        """The floor, the clients, the floor again. Raises ``LoadError``."""
        self._floor.send((count, self.options.seconds / 4))
        before = answer(self._floor)
        window = self._window(count)
        self._floor.send((count, self.options.seconds / 4))
        after = answer(self._floor)
        window.floors = before, after
        return window

    def _window(self, count: int) -> Window:
        self._phase.begin(count)
        new, self._known = range(self._known, count), max(self._known, count)
        for index, connection in enumerate(self._clients):
            connection.send(list(range(index, count, len(self._clients))))
        deadline = time.monotonic() + LONGEST_WAIT_S
        while self._phase.warm.value < count:
            if time.monotonic() > deadline:
                raise LoadError(f"{self._phase.warm.value} of {count} clients had warmed up after {LONGEST_WAIT_S} s")
            for connection in wait(self._clients, 0.02):
                answer(connection)  # before the window's end a client has nothing to say but why it failed
        clients = [os.getpid(), *(process.pid for process in multiprocessing.active_children() if process.pid)]
        processes = {"server": [self._server.pid], "rank": self._ranks, "clients": clients}

        def processor_seconds() -> dict[str, float]:
            used = {name: cpu_seconds(of) for name, of in processes.items()}
            return {**used, "other": machine_cpu_seconds() - sum(used.values())}

        used = processor_seconds()
        start, busy = time.monotonic(), []
        self._phase.end.value = end = start + self.options.seconds
        while (ahead := end - time.monotonic()) > 0:
            if (share := self._device.busy()) is not None:
                busy.append(share)
            time.sleep(min(ahead, 0.1))
        taken = time.monotonic() - start
        cores = {name: (seconds - used[name]) / taken for name, seconds in processor_seconds().items()}
        calls: list[Call] = []
        deadline, left = time.monotonic() + LONGEST_WAIT_S, count
        while left:
            if not (ready := wait(self._clients, max(0.0, deadline - time.monotonic()))):
                raise LoadError(f"{left} of {count} clients had not ended {LONGEST_WAIT_S:.0f} s after the window")
            for connection in ready:
                calls += answer(connection)
                left -= 1
        numbers = server_numbers(self._server.url)
        return Window(
            clients=count,
            calls=calls,
            start=start,
            end=end,
            busy=busy,
            cores=cores,
            numbers=numbers,
            new=new,
        )


def rows_of(window: Window, options: argparse.Namespace) -> list[dict[str, Any]]:
    count, seconds = window.clients, window.end - window.start
    floor = {name: sum(of[name] for of in window.floors) for name in window.floors[0]}
    by_kind = {kind: window.shares(kind) for kind in KINDS}
    done = {kind: sum(share for _, share in found) for kind, found in by_kind.items()}
    sampled = sum(call.tokens * share for call, share in by_kind["sample"])
    trained = sum(call.tokens * share for call, share in by_kind["forward_backward"])
    steps = sum(done.values()) / len(KINDS)

    def lockstep(backward: str, floor: Mapping[str, float] = floor) -> float:
        """Its seconds for the window's work."""
        return (
            sampled * floor["sample"] / floor["sampled"]
            + trained * floor[backward] / floor["trained"]
            + done["optim_step"] * floor["optim_step"] / floor["steps"]
            + done["save"] * floor["save"] / floor["steps"]
        )

    rows: list[dict[str, Any]] = []

    def row(id: str, what: str, value: float | None, baseline: float | None = None) -> None:
        ratio = None if value is None or not baseline else value / baseline
        rows.append({"id": f"{id}@{count}", "what": what, "value": value, "baseline": baseline, "ratio": ratio})

    rounds, packed = floor["rounds"], lockstep("forward_backward")
    row("load_vs_lockstep", "seconds in lockstep for the window's work; baseline: the window's", packed, seconds)
    own = "forward_backward, own passes"
    if own in floor:
        what = "the same, with passes of its own for each request as a server has them on a CPU"
        row("load_vs_lockstep_own_passes", what, lockstep(own), seconds)
    before, after = (lockstep("forward_backward", of) for of in window.floors)
    row("lockstep_drift", "lockstep's seconds after the window; baseline: before it", after, before)
    row("steps_per_s", "steps of all clients a second; baseline: in lockstep", steps / seconds, steps / packed)
    row("sampled_tokens_per_s", "baseline: in lockstep", sampled / seconds, sampled / packed)
    row("trained_tokens_per_s", "baseline: in lockstep", trained / seconds, trained / packed)
    whole = window.steps()
    ended = {(call.client, call.step) for call, _ in by_kind["save"]}
    inside = [taken for key, taken in whole.items() if key in ended]
    parts = {"step": inside, **{kind: [c.ended - c.began for c, _ in found] for kind, found in by_kind.items()}}
    at_once = {kind: floor[kind] / rounds for kind in KINDS}
    at_once["step"] = sum(at_once.values())
    for name, taken in parts.items():
        for percent in (50, 95):
            value = float(np.percentile(taken, percent)) if taken else None
            row(f"{name}_p{percent}_s", "seconds; baseline: of all clients at once in lockstep", value, at_once[name])
    intervals = [1000 * call.interval for call, _ in by_kind["sample"]]
    for percent in (50, 95, 99):
        at = float(np.percentile(intervals, percent)) if intervals else None
        row(f"token_interval_p{percent}_ms", "a sample's milliseconds by its tokens", at)
    new = [whole[number, 0] for number in window.new]
    later = statistics.median(inside) if inside else None
    row("first_step_ratio", "seconds of new clients' first steps; baseline: of later ones, medians",
        statistics.median(new) if new else None, later)  # fmt: skip
    row("device_busy", "share of the window, by NVML", statistics.mean(window.busy) if window.busy else None)
    for name, cores in window.cores.items():
        row(f"{name}_cores", "processor seconds a second", cores)
    for name, value in sorted(window.numbers.items()):
        if "version" in name or name.endswith("_bytes"):
            row(name, "of /metrics, at the window's end", value)
    what = "seconds of the linear layers' products alone, of a round in lockstep; baseline: the round"
    row("lockstep_linear_s", what, floor["linear"] / rounds, at_once["step"])
    return rows


def show(row: Mapping[str, Any]) -> str:
    value, baseline, ratio = (
        "-" if row[name] is None else f"{row[name]:.4g}" if abs(row[name]) < 1e5 else f"{row[name]:.0f}"
        for name in ("value", "baseline", "ratio")
    )
    return f"{row['id']:<36} {value:>12} {baseline:>12} {ratio:>8}  {row['what']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", help="numbers of clients, measured one after another")
    parser.add_argument("--shape", default="smollm2", help="smollm2 or a directory: its weights; a shape: random ones")
    parser.add_argument("--seconds", type=float, help="of each window")
    parser.add_argument("--samples", type=int, help="of each step")
    parser.add_argument("--tokens", type=int, help="of each sample, on average")
    parser.add_argument("--think", type=float, default=0.05, help="seconds between two steps, on average")
    parser.add_argument("--warm-up", type=int, default=2, metavar="STEPS", help="of each client before the window")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--quick", action="store_true", help="small enough for two cores of a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.clients = sorted(set(options.clients))
    os.environ["TINKER_TELEMETRY"] = "0"  # the processes of clients inherit it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes
    rows: list[dict[str, Any]] = []
    try:
        with ExitStack() as stack:
            running = Load(stack, options)
            facts = {name: value for name, value in running.facts.items() if name not in ("text", "directory")}
            print(json.dumps({**facts, "shape": options.shape}), flush=True)
            what = f"seconds until ready; {facts['device']}, torch {facts['torch']}, {facts['dtype']}, {options.shape}"
            rows.append({"id": "start_s", "what": what, "value": running.start_s, "baseline": None, "ratio": None})
            print(show(rows[0]), flush=True)
            for count in options.clients:
                found = rows_of(running.measure(count), options)
                rows += found
                for row in found:
                    print(show(row), flush=True)
    except (LoadError, DescantError) as error:
        sys.exit(f"bench/load.py: {error}")
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
