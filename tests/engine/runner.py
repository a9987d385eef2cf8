# SPDX-License-Identifier: Apache-2.0
"""One engine in one process: ``python -m tests.engine.runner JOB.json RESULT.json``, or many such processes: `serve`.

A job is ``{"model": path, "engine": {LLM arguments}, "scenarios": [...]}``. Scenarios run in order on the same
engine (a start costs seconds, a scenario on a tiny model little). Each has a ``name``, a ``kind`` and the
arguments of the function of that kind below. The result holds, per scenario, what the function returned and
the state of the block pool afterwards.

A job ``{"engines": [{"name", "model", "engine", "scenarios"}]}`` runs one engine after the other in this process, and
a job ``{"refusals": [{"name", "model", "engine"}]}`` tries to start them and tells what each raised.
"""

import gc
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any


def sampling(**options: Any) -> Any:
    from vllm import SamplingParams

    defaults = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": 2}
    return SamplingParams(**{**defaults, **options})


def describe(output: Any) -> dict:
    """Token ids of every completion with their logprobs and margins, and the length of the prefix hit.

    A margin is how far a greedy token's logprob lies above the runner-up's.
    """

    def margin(entry: dict) -> float:
        best, second = sorted((candidate.logprob for candidate in entry.values()), reverse=True)[:2]
        return best - second

    return {
        "token_ids": [list(completion.token_ids) for completion in output.outputs],
        "logprobs": [
            [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            for completion in output.outputs
        ],
        "margins": [[margin(entry) for entry in completion.logprobs] for completion in output.outputs],
        "cached": output.num_cached_tokens,
        "prompt_logprobs": output.prompt_logprobs
        and [
            None if entry is None else entry[token].logprob
            for entry, token in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        ],
    }


class Runner:
    def __init__(self, model: str, engine: dict) -> None:
        from vllm import LLM

        defaults = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "seed": 0,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 32,
            "enable_prefix_caching": False,
        }
        self.llm = LLM(model, **{**defaults, **engine})
        self.preemptions = 0
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        self.scheduler = getattr(core, "scheduler", None)  # absent when the engine is another process
        if self.scheduler is not None:
            preempt = self.scheduler._preempt_request

            def count(*args: Any, **kwargs: Any) -> Any:
                self.preemptions += 1
                return preempt(*args, **kwargs)

            self.scheduler._preempt_request = count

    def pool(self) -> dict:
        """Blocks of the pool that no request holds. ``free`` is None when the engine is another process;
        ``reset`` (vLLM's own prefix-cache reset, which refuses while a block is in use) works everywhere.
        ``in_store`` are blocks of an offloading connector's own pool that it still holds for a copy."""
        free = total = None
        in_store = 0
        if self.scheduler is not None:
            if self.scheduler.connector is not None:
                while self.scheduler.has_requests():
                    self.llm.llm_engine.step()
                store = self.scheduler.connector.scheduler_manager.cpu_block_pool
                in_store = store.num_gpu_blocks - 1 - store.get_num_free_blocks()
            block_pool = self.scheduler.kv_cache_manager.block_pool
            free, total = block_pool.get_num_free_blocks(), block_pool.num_gpu_blocks
        return {"free": free, "total": total, "in_store": in_store, "reset": self.llm.reset_prefix_cache()}

    # -- kinds of scenario -------------------------------------------------------------------------------

    def generate(self, prompts: list, rounds: int = 1, one_at_a_time: bool = False, **options: Any) -> list:
        """``rounds`` times all prompts in one call (or one call each); returns rounds of outputs."""
        params = sampling(**options)
        result = []
        for _ in range(rounds):
            batches = [[prompt] for prompt in prompts] if one_at_a_time else [prompts]
            outputs = [
                output
                for batch in batches
                for output in self.llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False
                )
            ]
            result.append([describe(output) for output in outputs])
        return result

    def conversation(self, prompts: list, turns: list, **options: Any) -> list:
        """Every prompt is continued by its own answer and the turn's tokens, as a chat is."""
        histories = [list(prompt) for prompt in prompts]
        result = []
        for added in [[], *turns]:
            for history in histories:
                history.extend(added)
            outputs = self.generate(histories, **options)[0]
            for history, output in zip(histories, outputs, strict=True):
                history.extend(output["token_ids"][0])
            result.append(outputs)
        return result

    def abort(self, prompts: list, aborted: list, after_steps: int, **options: Any) -> dict:
        """All prompts start; after some engine steps those of the indices ``aborted`` are cancelled."""
        engine = self.llm.llm_engine
        ids = [f"abort-{index}" for index in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling(**options))
        finished, steps = {}, 0
        while engine.has_unfinished_requests():
            if steps == after_steps:
                engine.abort_request([ids[index] for index in aborted])
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = describe(output)
            steps += 1
        return {str(index): finished[name] for index, name in enumerate(ids) if name in finished}

    def beams(self, prompts: list, width: int, max_tokens: int) -> list:
        """Beam search: per prompt, the generated token ids of every beam, best first."""
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [
            [beam.tokens[len(prompt) :] for beam in output.sequences]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def structured(self, prompts: list, schema: dict, **options: Any) -> list:
        """Greedy answers that a JSON schema constrains: per prompt, the text."""
        from vllm.sampling_params import StructuredOutputsParams

        constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        params = sampling(ignore_eos=False, detokenize=True, structured_outputs=constraint, **options)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    def adapted(self, prompts: list, adapter: str, **options: Any) -> list:
        """All prompts with a LoRA adapter; one round of outputs."""
        from vllm.lora.request import LoRARequest

        inputs, request = [{"prompt_token_ids": prompt} for prompt in prompts], LoRARequest("adapter", 1, adapter)
        outputs = self.llm.generate(inputs, sampling(**options), lora_request=request, use_tqdm=False)
        return [[describe(output) for output in outputs]]

    def images(self, prompts: list, size: int, **options: Any) -> list:
        """Every prompt with an image of its own where its image token stands; one round of outputs."""
        import numpy
        from PIL import Image

        inputs = []
        for seed, prompt in enumerate(prompts):
            pixels = numpy.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=numpy.uint8)
            inputs.append({"prompt_token_ids": prompt, "multi_modal_data": {"image": Image.fromarray(pixels)}})
        outputs = self.llm.generate(inputs, sampling(**options), use_tqdm=False)
        return [[describe(output) for output in outputs]]

    def sleep(self, level: int, prompts: list, **options: Any) -> list:
        """Outputs of all prompts before and after a sleep of level 1, or of level 2 with the weights loaded again."""
        before = self.generate(prompts, **options)[0]
        self.llm.sleep(level=level)
        self.llm.wake_up(tags=["weights"])
        if level == 2:
            self.llm.collective_rpc("reload_weights")
        self.llm.wake_up(tags=["kv_cache"])
        return [before, self.generate(prompts, **options)[0]]

    def counters(self) -> dict:
        """vLLM's own counters since the start (the engine argument ``disable_log_stats`` must be False)."""
        from vllm.v1.metrics.reader import Counter

        return {metric.name: metric.value for metric in self.llm.get_metrics() if isinstance(metric, Counter)}

    def shapes(self) -> dict:
        """KV-cache groups of the engine: spec class, block size, page bytes, layers."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return {
            "groups": [
                {
                    "spec": type(group.kv_cache_spec).__name__,
                    "block_size": group.kv_cache_spec.block_size,
                    "page_bytes": group.kv_cache_spec.page_size_bytes,
                    "layers": len(group.layer_names),
                }
                for group in groups
            ]
        }

    def run(self, name: str, kind: str, keep_cache: bool = False, **arguments: Any) -> dict:
        before = self.preemptions
        result = getattr(self, kind)(**arguments)
        preemptions = self.preemptions - before
        return {"result": result, "preemptions": preemptions, "pool": None if keep_cache else self.pool()}


def refusal(model: str, engine: dict) -> dict:
    """What starting this engine raises: class names of the error and its bases, and its text; None if it starts."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        LLM(model, **{"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024, **engine})
    except Exception as error:
        return {"types": [cls.__name__ for cls in type(error).__mro__], "message": str(error)}
    finally:
        cleanup_dist_env_and_memory()
    return {"types": None, "message": "the engine started"}


def run_engine(model: str, engine: dict, scenarios: list[dict]) -> dict:
    """Results by scenario name of one engine, which is gone afterwards."""
    from vllm.distributed import cleanup_dist_env_and_memory

    runner = Runner(model, engine)
    try:
        return {scenario["name"]: runner.run(**scenario) for scenario in scenarios}
    finally:
        del runner
        cleanup_dist_env_and_memory()


def main(job_path: str, result_path: str) -> None:
    with open(job_path) as file:
        job = json.load(file)
    if "refusals" in job:
        results = {case["name"]: refusal(case["model"], case["engine"]) for case in job["refusals"]}
    elif "engines" in job:
        results = {case.pop("name"): run_engine(**case) for case in job["engines"]}
    else:
        runner = Runner(job["model"], job["engine"])
        results = {scenario["name"]: runner.run(**scenario) for scenario in job["scenarios"]}
    with open(result_path, "w") as file:
        json.dump(results, file)


def run_job(job_path: str, result_path: str, log_path: str, environment: dict[str, str]) -> None:
    """`main` in a process of its own, everything it prints in a log."""
    os.environ.update(environment)
    with open(log_path, "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(os.path.dirname(job_path))
    main(job_path, result_path)


def serve(descriptor: int) -> None:
    """Runs jobs in forks of this process, one at a time: most of an engine's start is vLLM's import, done once here.

    The arguments of `run_job` arrive on a connection, which is sent the job's exit status.
    """
    import vllm.model_executor.models.registry as registry
    from vllm import LLM  # noqa: F401

    # Architectures are looked at in a new process each, so that CUDA stays untouched, and vLLM is imported again there.
    registry._run_in_subprocess = lambda inspect: inspect()
    gc.collect()
    gc.freeze()  # no collection in a fork walks through, and thereby copies, what was imported
    connection, fork = Connection(descriptor), multiprocessing.get_context("fork")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        process = fork.Process(target=run_job, args=job)
        process.start()
        process.join()
        connection.send(process.exitcode)


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1] == "serve" else main(*sys.argv[1:])
