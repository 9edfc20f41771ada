"""The first tokens that an engine generates, to find out whether it works."""

from vllm.inputs.engine import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
from vllm.v1.engine.exceptions import EngineGenerateError

from kvroute.contract.generation import CannotRunError
from kvroute.replica.vllm_engine.core.rank_core import RankCore
from kvroute.replica.vllm_engine.process.crash_log import CrashLog


async def run_smoke_test(core: RankCore, crash_log: CrashLog) -> None:
    """Generate two tokens, because vLLM's start does not run every kernel that a request needs.

    Raises:
        CannotRunError: The engine died of an error that would occur again.
    """
    llm = core.llm
    if "generate" not in await llm.get_supported_tasks() or llm.model_config.is_encoder_decoder:
        return
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    try:
        async for _ in llm.generate(
            tokens_input([0]), params, f"first-{core.rank}", data_parallel_rank=core.rank
        ):
            pass
    except VllmDeadError as error:
        if message := crash_log.message():
            raise CannotRunError(message) from error
        raise  # there is no message, so the engine was probably killed from outside
    except (ValueError, EngineGenerateError):
        return  # the model rejects this prompt, but the engine works
