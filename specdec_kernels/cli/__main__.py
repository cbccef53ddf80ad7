"""``specdec-kernels``: one module of this folder for each command, imported when it is asked for."""

import argparse
import importlib
import sys

# Command -> the line shown by --help. The module of the same name has add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "demo": "decode a few prompts plainly and speculatively, and compare",
    "doctor": "show versions, devices, and which kernel serves each op",
    "calibrate": "measure what steps and drafters cost on this machine, for `tree optimize` and for budgets",
    "inspect": "compile the Triton kernels for a GPU that need not be here; show registers, spills, occupancy",
    "bench": "run a microbenchmark on this machine",
    "search": "search which blocks a model skips while drafting for itself",
    "train": "train draft heads or an adapter for a model",
    "tree": "draw, convert and optimise draft trees",
}
# What a command may need beyond the base install -> the extra that brings it.
EXTRAS = {
    "accelerate": "demo", "gguf": "demo", "optuna": "search", "safetensors": "hf", "tqdm": "train",
    "transformers": "hf",
}  # fmt: skip
RESUMABLE = ("search", "train")
# The exit code of a command that ctrl-C has ended, as shells have it.
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code. A package that is not installed is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="specdec-kernels", description="Kernels for speculative decoding: tools.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((a for a in argv if a in COMMANDS), None)
    for name, text in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text)
        if name == chosen:
            importlib.import_module(f".{name}", __package__).add_arguments(subparser)
    args = parser.parse_args(argv)
    args.argv = argv
    try:
        return importlib.import_module(f".{args.command}", __package__).run(args)
    except KeyboardInterrupt:
        further = "; the same command goes on from here" if args.command in RESUMABLE else ""
        print(f"specdec-kernels {args.command}: stopped{further}", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(
            f"specdec-kernels {args.command}: {package} is not installed: "
            f"pip install 'specdec-kernels[{EXTRAS[package]}]'",
            file=sys.stderr,
        )
        return 2
    except (OSError, NotImplementedError) as error:
        # A folder, file or model that is not there or cannot be read, or one of a kind that is not supported: the
        # user's to mend, not a fault of ours.
        print(f"specdec-kernels {args.command}: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
