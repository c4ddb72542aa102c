"""Trains a policy and its draft: `train.py --gin_file=configs/tiny.gin --workdir=runs/tiny`."""

import sys

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("gin_file", [], "Configuration files, in order.")
flags.DEFINE_multi_string("gin_param", [], "Single settings, such as TrainingConfig.steps=10.")
flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and the report.")
flags.DEFINE_bool("resume", True, "Go on with the run in the folder; False refuses a used one.")
flags.DEFINE_bool("dry_run", False, "Check every shape, print sizes and the mesh, train nothing.")


def main(_):
    from jaxspec.config import load_experiment, operative_config
    from jaxspec.training.console import Progress
    from jaxspec.training.loop import train
    from jaxspec.training.setup import dry_run_table

    if not FLAGS.gin_file:
        raise ValueError("--gin_file is not set; try --gin_file=configs/tiny.gin")
    experiment = load_experiment(FLAGS.gin_file, FLAGS.gin_param)
    if FLAGS.dry_run:
        Progress(0).summary(f"{experiment.name} (dry run)", dry_run_table(experiment))
        return
    if FLAGS.workdir is None:
        raise ValueError("--workdir is not set; name a folder for the run, such as runs/tiny")
    train(
        experiment,
        FLAGS.workdir,
        resume=FLAGS.resume,
        operative_config=operative_config(experiment),
    )


if __name__ == "__main__":
    from jaxspec.training.console import run_app

    sys.exit(run_app(lambda: app.run(main)))
