"""B06: a model used before a fork hung its child; one used by two threads crashed after a cache hit."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

from model.cold import Answer, ask
from model.conftest import MakeLlama

from shmcache import Cache
from shmcache.errors import UsedAfterFork

PROMPTS = [
    f"{number}. A prompt that is long enough to be worth a row of its own. " * 4 for number in range(5)
]


def test_case_b06_a_model_used_after_a_fork_raises_at_once_with_advice(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], cache, n_threads=2, n_threads_batch=2)
    ask(llama, PROMPTS[0])  # with two threads: a child that evaluated now would hang
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            ask(llama, PROMPTS[0])
        except UsedAfterFork as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], 20)
    message = os.read(reader, 4096).decode() if ready else "the child hangs"
    os.kill(pid, 9) if not ready else None
    os.waitpid(pid, 0)
    os.close(reader)
    assert f"made in process {os.getpid()} and used in process {pid}" in message
    assert "load the model after the fork" in message
    assert ask(llama, PROMPTS[0]).report.cache_hit_kind == "exact"


def test_case_b06_two_threads_on_one_model_get_the_answers_of_one(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    alone = worker(tiny_models["llama"])
    expected = {prompt: ask(alone, prompt).text for prompt in PROMPTS}
    llama = worker(tiny_models["llama"], cache)
    answers: list[tuple[str, Answer]] = []

    def ask_them_all() -> None:
        for prompt in PROMPTS * 2:
            answers.append((prompt, ask(llama, prompt)))

    threads = [threading.Thread(target=ask_them_all) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 20
    assert all(answer.text == expected[prompt] for prompt, answer in answers)
    assert {answer.report.cache_hit_kind for _, answer in answers} == {"cold", "exact"}
