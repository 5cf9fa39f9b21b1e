"""Runs a GGUF model with llama-cpp-python, in an interpreter that has it.

    python llama_worker.py MODEL.gguf flash|exact

Imports nothing of this repository. Requests come as JSON lines on stdin, answers leave as JSON lines on stdout:

    {"op": "answer", "prompt": [ids], "n": tokens, "threads": t}  ->  {"ids": [ids], "seconds": s}
    {"op": "step", "prompt": [ids], "n": steps, "threads": t}     ->  {"seconds": [s], "cpu_seconds": [s]}
    {"op": "logits", "prompt": [ids], "n": last, "threads": t}    ->  {"logits": [[float]]}, of the last positions

The first line it writes says what it is. Caches are float32; `exact` leaves flash attention out, which rounds what it
multiplies to float16, `flash` leaves the choice to llama.cpp. `seconds` of an answer leave out the prompt and the first
token, which comes with it; `cpu_seconds` are the calling thread's, which with one thread does all the work.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

ROOM = 2048  # tokens
F32 = 0
ERROR = 4  # of llama.cpp's log levels


class Model:
    """One sequence in one context."""

    def __init__(self, path: str, *, has_flash: bool) -> None:
        """Loads `path`. Raises RuntimeError when that fails."""
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if self.model is None:
            raise RuntimeError("llama.cpp cannot load the model")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = ROOM
        params.type_k = params.type_v = F32
        params.no_perf = True
        if not has_flash:
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if self.context is None:
            raise RuntimeError("llama.cpp cannot make a context")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def about(self) -> dict[str, str]:
        """Versions and instructions it was built for."""
        text = llama_cpp.llama_print_system_info().decode()
        return {"version": llama_cpp.__version__, "system": text.strip()}

    def restart(self, threads: int) -> None:
        """Forget every token."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        llama_cpp.llama_set_n_threads(self.context, threads, threads)

    def run(self, ids: list[int], start: int, *, every: bool = False) -> None:
        """Add tokens from position `start`; logits of the last, or of every one."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = every or i == len(ids) - 1
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def logits(self, at: int) -> np.ndarray:
        """[vocabulary], a view that the next `run` changes."""
        pointer = llama_cpp.llama_get_logits_ith(self.context, at)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (self.n_vocab,))


def answer(model: Model, prompt: list[int], n: int) -> dict[str, Any]:
    """Greedy tokens."""
    model.run(prompt, 0)
    ids = [int(model.logits(-1).argmax())]
    started = time.perf_counter()
    while len(ids) < n:
        model.run(ids[-1:], len(prompt) + len(ids) - 1)
        ids.append(int(model.logits(-1).argmax()))
    return {"ids": ids, "seconds": time.perf_counter() - started}


def step(model: Model, prompt: list[int], n: int) -> dict[str, Any]:
    """Single tokens after a prompt, those of the prompt again."""
    model.run(prompt, 0)
    wall, cpu = list[float](), list[float]()
    for i in range(n):
        started, thread = time.perf_counter(), time.thread_time()
        model.run([prompt[i % len(prompt)]], len(prompt) + i)
        model.logits(-1)
        wall.append(time.perf_counter() - started)
        cpu.append(time.thread_time() - thread)
    return {"seconds": wall, "cpu_seconds": cpu}


def logits(model: Model, prompt: list[int], n: int) -> dict[str, Any]:
    """The last `n` positions'."""
    model.run(prompt, 0, every=True)
    rows = [model.logits(i).tolist() for i in range(len(prompt) - n, len(prompt))]
    return {"logits": rows}


def write_error(level: int, text: bytes, _: Any) -> None:
    """Pass on what llama.cpp says when something fails."""
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    """Serve until stdin ends."""
    errors_only = llama_cpp.llama_log_callback(write_error)
    llama_cpp.llama_log_set(errors_only, None)
    model = Model(sys.argv[1], has_flash=sys.argv[2] == "flash")
    operations: dict[str, Callable[..., dict[str, Any]]] = {
        "answer": answer,
        "step": step,
        "logits": logits,
    }
    print(json.dumps(model.about()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        model.restart(request.pop("threads"))
        reply = operations[request.pop("op")](model, **request)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
