"""Learning on the job: what is kept, when the child runs, which head takes over, and that no text changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import psutil
import pytest
from heads import chain_model
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from serving import serving

from outrider import LLM, SamplingParams
from outrider.drafters.heads import selftest
from outrider.drafters.heads.eagle.drafter import Pairs
from outrider.engine import Engine
from outrider.engine.scheduler import Scheduler
from outrider.serve.learn import learner as learning
from outrider.serve.learn.learner import Learner, compared
from outrider.serve.learn.reservoir import DAY, Reservoir, ServedText, kept_texts
from outrider.serve.openai.protocol import ChatRequest, CompletionRequest
from outrider.serve.options import ServeOptions
from outrider.train import trainer
from outrider.train.settings import TrainingSettings
from outrider.train.trainer import TrainingBudget, train


def text(n: int, workload: str = "a", owner: str = "me", when: float = 0.0, size: int = 10) -> ServedText:
    return ServedText([n, n + 1], [n] * size, 0.0, workload, owner, when)


def wait(what: Callable[[], Any]) -> None:
    """Look until something is true."""
    for _ in range(6_000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("it never became true")


# -- what is kept ---------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 60)), max_size=40),
    st.integers(500, 3000),
)
def test_the_file_is_bounded_and_fair(tmp_path_factory: pytest.TempPathFactory, kept: list[Any], limit: int) -> None:
    path = tmp_path_factory.mktemp("kept") / "texts.jsonl"
    keep = Reservoir(path, limit, now=lambda: 0.0)
    for n, (workload, owner, size) in enumerate(kept):
        keep.add(text(n, workload, owner, size=size))
        assert path.stat().st_size <= limit
    left = list(kept_texts(path))
    assert keep.count == len(left)
    assert keep.held == sum(t.held_out for t in left)
    assert [t.prompt for t in left] == sorted(t.prompt for t in left)
    for name in {t.workload for t in left}:  # of each kind the newest ones are kept
        mine = [[n, n + 1] for n, (workload, _, _) in enumerate(kept) if workload == name]
        assert [t.prompt for t in left if t.workload == name] == mine[-sum(t.workload == name for t in left) :]
    keep.forget("x")
    assert {t.owner for t in kept_texts(path)} <= {"y"}
    keep.close()


def test_the_newest_text_of_a_rare_kind_stays(tmp_path: Path) -> None:
    keep = Reservoir(tmp_path / "texts.jsonl", 2000, now=lambda: 0.0)
    keep.add(text(0, "rare"))
    for n in range(1, 100):
        keep.add(text(n, "often"))
    assert "rare" in {t.workload for t in keep.texts()}


def test_old_texts_go_and_half_a_line_is_cut(tmp_path: Path) -> None:
    path, now = tmp_path / "texts.jsonl", [0.0]
    keep = Reservoir(path, now=lambda: now[0])
    keep.add(text(0))
    keep.add(text(1, when=20 * DAY))
    keep.close()
    with path.open("ab") as file:
        file.write(b'{"prompt": [1')
    now[0] = 31 * DAY
    keep = Reservoir(path, now=lambda: now[0])
    assert [t.prompt[0] for t in keep.texts()] == [1]
    keep.add(text(2, when=31 * DAY))
    assert [t.prompt[0] for t in keep.texts()] == [1, 2]


def test_one_server_keeps_texts_in_a_folder(tmp_path: Path) -> None:
    keep = Reservoir(tmp_path / "texts.jsonl")
    with pytest.raises(ValueError, match=r"another server learns in .* give another folder: --learn"):
        Reservoir(tmp_path / "texts.jsonl")
    keep.close()
    Reservoir(tmp_path / "texts.jsonl").close()


def test_a_prompt_is_held_out_with_all_its_answers() -> None:
    some = [text(n) for n in range(400)]
    assert 20 <= sum(t.held_out for t in some) <= 80
    assert all(replace(t, answer=[1], when=5.0).held_out == t.held_out for t in some)


def test_another_file_is_no_texts(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "words"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1 is no text that a server kept"):
        list(kept_texts(tmp_path / "x.jsonl"))


# -- which head takes over ------------------------------------------------------------------------------------------------


def measured(**lengths: list[int]) -> list[tuple[str, int, int]]:
    return [(name, 100, n) for name, some in lengths.items() for n in some]


def test_a_better_head_takes_over_and_others_do_not() -> None:
    before = [150, 170, 160, 180, 155, 165, 175, 158, 162, 171]
    better, worse = [n + 30 + n % 7 for n in before], [n - 20 - n % 7 for n in before]
    chance = [n + (9 if i % 2 else -8) for i, n in enumerate(before)]
    assert compared(measured(a=before), measured(a=better))["takes_over"]
    for after in (worse, chance, before):
        assert not compared(measured(a=before), measured(a=after))["takes_over"]
    one = compared(measured(a=before, b=before), measured(a=better, b=worse))
    assert not one["takes_over"]
    most = compared(measured(a=before * 9, b=before), measured(a=better * 9, b=worse))
    assert not most["takes_over"]
    assert "but fewer for b" in most["why"]


# -- a server that learns -------------------------------------------------------------------------------------------------

FAKE = """
import json, shutil, sys, time
from pathlib import Path
asked = json.loads(sys.stdin.readline())
out = Path(asked["out"])
for name in ("config.json", "model.safetensors"):
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(sys.argv[1]) / name, out / name)
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
(out / "training").mkdir()
(out / "training" / "run.json").write_text(Path(sys.argv[2]).read_text())
"""


class Folder:
    """model, head, other: folders. result: what the fake child says when it may end."""

    def __init__(self, path: Path) -> None:
        self.model, self.head, self.other = path / "model", path / "head", path / "other"
        chain_model().save_pretrained(self.model)
        llm = LLM(str(self.model), max_num_seqs=trainer.SLOTS)
        made = TrainingSettings(method="eagle3", model=str(self.model), length=64, draft_vocab_size=0, batch_tokens=256)
        for seed, head in ((0, self.head), (1, self.other)):
            train(made.with_(seed=seed), TrainingBudget(tokens=600), head, llm, lambda line: None)

    def llm(self, rows: int = 4) -> LLM:
        config = {"method": "eagle", "model": str(self.head), "num_speculative_tokens": 3, "controller": "fixed"}
        return LLM(str(self.model), speculative_config=config, max_num_seqs=rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("learn"))


@pytest.fixture
def engine(folder: Folder) -> Iterator[tuple[LLM, Engine]]:
    llm = folder.llm()
    engine = Engine(llm.runtime, max_queue=2000)
    yield llm, engine
    engine.close()
    assert engine.scheduler.problems() == []


def written(llm: LLM, engine: Engine, numbers: range, between: Callable[[], None] = lambda: None) -> list[list[int]]:
    """Texts by an engine, each to its end."""
    made, ended = [], SimpleQueue[int]()
    for n in numbers:
        params = SamplingParams(temperature=0.8 * (n % 2), max_tokens=40, seed=n, ignore_eos=True)
        [request] = llm.requests([1 + n % 60, 2 + n % 7], params)
        sink = lambda delta: delta.ended and ended.put(0)  # noqa: E731
        made += engine.submit([replace(request, sink=sink, workload="kind", owner="key 1")])
    between()
    for _ in made:
        ended.get(timeout=PATIENCE)
    return [sequence.written for sequence in made]


def test_no_text_changes_when_a_head_is_swapped_under_load(folder: Folder, engine: tuple[LLM, Engine]) -> None:
    llm, runs = engine
    plain = LLM(str(folder.model))
    prompts = [{"prompt_token_ids": [1 + n % 60, 2 + n % 7]} for n in range(24)]
    params = [SamplingParams(temperature=0.8 * (n % 2), max_tokens=40, seed=n, ignore_eos=True) for n in range(24)]
    expected = [out.outputs[0].token_ids for out in plain.generate(prompts, params)]
    before = runs.roster.drafters["eagle"]
    assert written(llm, runs, range(24)) == expected

    def swaps() -> None:
        for head in (folder.other, folder.head, folder.other):
            runs.adopt("eagle", llm.runtime.remade("eagle", str(head)))

    assert written(llm, runs, range(24), swaps) == expected
    assert runs.roster.drafters["eagle"] is not before
    assert written(llm, runs, range(24)) == expected
    assert runs.memory.bytes > 0


def test_a_head_of_other_layers_is_not_taken(folder: Folder, engine: tuple[LLM, Engine]) -> None:
    llm, runs = engine
    other = llm.runtime.remade("eagle", str(folder.other))
    assert isinstance(other.levels, Pairs)
    other.taps = (0, 1)
    with pytest.raises(ValueError, match="reads the layers"):
        runs.adopt("eagle", other)


def points(before: int, after: int) -> str:
    some = [[["kind", 100, n + i] for i in range(10)] for n in (before, after)]
    return json.dumps({"curve": [{"texts": one} for one in some]})


@pytest.fixture
def fake(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file whose content ends the child, which trains nothing."""
    (tmp_path / "fake.py").write_text(FAKE)
    result = tmp_path / "result.json"
    monkeypatch.setattr(
        learning, "COMMAND", [sys.executable, str(tmp_path / "fake.py"), str(folder.other), str(result)]
    )
    monkeypatch.setattr(learning, "REST", 0.05)
    monkeypatch.setattr(learning, "HELD", 1)
    monkeypatch.setattr(learning, "NEW", 12)
    return result


def learner(folder: Folder, path: Path, llm: LLM, engine: Engine) -> Learner:
    made = Learner(path, llm, engine, {"model": str(folder.model)}, 1.0)
    made.start()
    return made


def test_the_head_that_drafts_longer_takes_over_and_survives_a_restart(
    folder: Folder, engine: tuple[LLM, Engine], fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "NEW", 24)  # all texts of a turn, so each turn is one training
    llm, runs = engine
    learns = learner(folder, tmp_path / "learn", llm, runs)
    first, texts = runs.roster.drafters["eagle"], written(llm, runs, range(24))
    fake.write_text(points(150, 120))
    wait(lambda: learns.status()["rounds"] == 1)
    assert learns.status()["taken"] == 0
    assert runs.roster.drafters["eagle"] is first
    fake.write_text(points(150, 190))
    written(llm, runs, range(24))
    wait(lambda: learns.status()["rounds"] == 2)
    wait(lambda: runs.roster.drafters["eagle"] is not first)
    assert learns.status()["taken"] == 1
    assert learns.status()["head"] == "0002"
    assert sorted(f.name for f in (tmp_path / "learn" / "heads" / "0002").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert written(llm, runs, range(24)) == texts
    learns.close()
    again = learner(folder, tmp_path / "learn", llm, runs)
    assert again.status()["head"] == "0002"
    assert again.reservoir.count == learns.reservoir.count
    again.close()


def test_the_child_stands_still_while_requests_run(
    folder: Folder, engine: tuple[LLM, Engine], fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, runs = engine
    learns = learner(folder, tmp_path / "learn", llm, runs)
    written(llm, runs, range(24))
    wait(lambda: learns.running)
    assert learns._child is not None
    assert learns._state["asked"]["settings"]["keep_features"]
    child = psutil.Process(learns._child.pid)
    wait(lambda: child.nice() == 19)
    monkeypatch.setattr(learning, "REST", 1.0)  # its credit would last a second
    wait(lambda: learns.running)
    busy, looks = [True], [0]
    monkeypatch.setattr(Scheduler, "idle", property(lambda self: looks.append(0) or not busy[0]))
    wait(lambda: not learns.running)
    assert len(looks) <= 6  # it was seen at the next look
    wait(lambda: child.status() == psutil.STATUS_STOPPED)
    busy[0] = False
    wait(lambda: learns.running)
    wait(lambda: child.status() != psutil.STATUS_STOPPED)
    learns.close()
    assert not child.is_running()
    state = json.loads((tmp_path / "learn" / "state.json").read_text())
    assert state["asked"]["settings"]["start"] == str(folder.head)  # it goes on after the next start


def test_a_share_of_the_idle_time_is_kept(
    folder: Folder, engine: tuple[LLM, Engine], fake: Path, tmp_path: Path
) -> None:
    llm, runs = engine
    learns = Learner(tmp_path / "learn", llm, runs, {"model": str(folder.model)}, 0.3)
    learns.start()
    written(llm, runs, range(24))
    wait(lambda: learns.running)
    wait(lambda: learns._child is not None and not learns.running)  # its credit is used up, though nothing runs
    wait(lambda: learns.running)
    learns.close()


def test_who_takes_texts_back_takes_the_heads_back(
    folder: Folder, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.write_text(points(150, 190))
    llm = folder.llm()
    with serving(llm, max_queue=2000) as live:
        runs = live.service.engine
        live.service.learner = learns = learner(folder, tmp_path / "learn", llm, runs)
        first = runs.roster.drafters["eagle"]
        texts = written(llm, runs, range(24))
        wait(lambda: learns.status()["taken"] == 1)
        wait(lambda: runs.roster.drafters["eagle"] is not first)
        second = runs.roster.drafters["eagle"]
        assert learns.forget("another") == 0
        assert learns.status()["head"] == "0001"
        slow, add = threading.Event(), learns.reservoir.add
        monkeypatch.setattr(learns.reservoir, "add", lambda text: slow.wait(0.2) or add(text))
        written(llm, runs, range(24, 26))
        assert learns.forget("key 1") == 26  # also what had ended and was not written yet
        slow.set()
        wait(lambda: runs.roster.drafters["eagle"] is not second)
        assert learns.status()["head"] == "the first one"
        assert (tmp_path / "learn" / "texts.jsonl").read_bytes() == b""
        assert not (tmp_path / "learn" / "heads").exists()
        assert written(llm, runs, range(24)) == texts


def test_a_child_that_fails_leaves_the_head(
    folder: Folder, engine: tuple[LLM, Engine], fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, runs = engine
    monkeypatch.setattr(learning, "COMMAND", [sys.executable, "-c", "raise SystemExit(3)"])
    learns = learner(folder, tmp_path / "learn", llm, runs)
    first = runs.roster.drafters["eagle"]
    written(llm, runs, range(24))
    wait(lambda: learns.status()["rounds"] == 1)
    assert learns.status()["taken"] == 0
    assert runs.roster.drafters["eagle"] is first
    learns.close()


def test_a_learnt_head_that_is_damaged_is_left_aside(
    folder: Folder, engine: tuple[LLM, Engine], fake: Path, tmp_path: Path
) -> None:
    llm, runs = engine
    fake.write_text(points(150, 190))
    learns = learner(folder, tmp_path / "learn", llm, runs)
    texts = written(llm, runs, range(24))
    wait(lambda: learns.status()["taken"] == 1)
    learns.close()
    (tmp_path / "learn" / "heads" / "0001" / "model.safetensors").write_bytes(b"x")
    again = learner(folder, tmp_path / "learn", llm, runs)
    assert again.status()["head"] == "the first one"
    assert written(llm, runs, range(24)) == texts
    again.close()


def test_a_server_without_a_head_is_told_how_to_get_one(tmp_path: Path) -> None:
    llm = LLM("builtin:code", speculative_config={"method": "suffix"})
    with pytest.raises(ValueError, match=r"this server drafts with suffix; make a head first: outrider train eagle3"):
        Learner(tmp_path, llm, None, {"model": "builtin:code"}, 0.5)  # type: ignore[arg-type]


def test_texts_are_kept_by_kind_and_removed_over_http(folder: Folder, tmp_path: Path) -> None:
    llm = folder.llm()
    options = ServeOptions(model=str(folder.model), host="0.0.0.0", learn=tmp_path)
    with serving(llm, options) as live:
        live.service.learner = learns = learner(folder, tmp_path / "learn", llm, live.service.engine)
        body = {"prompt": [1, 2], "max_tokens": 12, "ignore_eos": True}
        assert httpx.post(live.url + "/v1/completions", json=body).status_code == 200
        wait(lambda: learns.reservoir.count == 1)
        assert [text.workload for text in learns.reservoir.texts()] == ["completions"]
        answer = httpx.delete(live.url + "/v1/learn").json()
        assert answer == {"object": "learn.deleted", "removed": 1}
        assert learns.reservoir.texts() == []


def test_chats_of_one_system_text_and_its_tools_are_of_one_kind() -> None:
    def kind(system: str, user: str, tools: list[dict[str, Any]] | None = None) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return ChatRequest.model_validate({"messages": messages, "tools": tools}).workload

    tools = [{"type": "function", "function": {"name": "f"}}]
    assert kind("a", "x") == kind("a", "y")
    assert len({kind("a", "x"), kind("b", "x"), kind("a", "x", tools), CompletionRequest(prompt="x").workload}) == 4


def test_a_head_that_is_remade_leaves_the_target_alone(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = folder.llm()
    monkeypatch.setattr(selftest, "examine", lambda *given: pytest.fail("the head was tried on a text"))
    assert isinstance(llm.runtime.remade("eagle", str(folder.other)).levels, Pairs)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [True, False])
def test_the_child_ends_with_a_server_that_is_killed(stopped: bool, tmp_path: Path) -> None:
    script = f"""
import json, os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "outrider.train.child"], stdin=subprocess.PIPE, text=True, process_group=0)
asked = {{"settings": {{"method": "eagle3", "model": "builtin:code"}}, "load": {{}}, "tokens": 10**9, "out": "{tmp_path}/x"}}
child.stdin.write(json.dumps(asked) + "\\n")
child.stdin.flush()
while not os.path.exists("{tmp_path}/x"):
    time.sleep(0.05)
if {stopped}:
    os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
signal.pause()
"""
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.long
def test_a_real_training_takes_over(
    folder: Folder, engine: tuple[LLM, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "REST", 0.1)
    monkeypatch.setattr(learning, "NEW", 300)
    llm, runs = engine
    learns = learner(folder, tmp_path / "learn", llm, runs)
    texts = written(llm, runs, range(400))
    wait(lambda: learns.status()["rounds"])
    assert learns.status()["taken"] == 1, learns.status()
    assert written(llm, runs, range(400)) == texts
    learns.close()
