"""Fits a draft to a policy's own replies, or to texts, and writes it as an EAGLE-3 folder."""

import sys

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("gin_file", [], "Configuration files; DraftConfig.warm_up must be set.")
flags.DEFINE_multi_string("gin_param", [], "Single settings, such as WarmUpConfig.steps=100.")
flags.DEFINE_string("texts", "", "A JSONL of texts to fit to; else the policy replies to prompts.")
flags.DEFINE_string("out", None, "Folder for the draft; must not exist yet.")


def main(_):
    from jaxspec.config import load_experiment
    from jaxspec.training.warm_up import warm_up_to_folder

    if not FLAGS.gin_file:
        raise ValueError(
            "--gin_file is not set; try --gin_file=configs/smollm2_135m_arithmetic.gin"
        )
    if FLAGS.out is None:
        raise ValueError("--out is not set; name a folder for the draft")
    warm_up_to_folder(load_experiment(FLAGS.gin_file, FLAGS.gin_param), FLAGS.out, FLAGS.texts)


if __name__ == "__main__":
    from jaxspec.training.console import run_app

    sys.exit(run_app(lambda: app.run(main)))
