"""`distrag doctor`."""

from __future__ import annotations

import json

from distrag.cli.words import command_parser, full_words


def run_doctor(words: list[str]) -> None:
    """Runs `distrag doctor`; the exit code is 1 where there is a problem."""
    parser = command_parser("doctor")
    parser.epilog = "With --config every other word, such as --data.path data/mine, is a key of the config, as for `distrag train`."
    parser.add_argument("--config", help="YAML of a run, whose store and run folder are looked at too")
    parser.add_argument("--json", action="store_true", help="for a program")
    args, overrides = parser.parse_known_args(words)
    if overrides and not args.config:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    from distrag.doctor.examine import examine
    from distrag.doctor.line import as_json, describe_lines

    lines = list(examine(["--config", args.config, *full_words(overrides)] if args.config else ()))
    told = as_json(lines)
    print(json.dumps(told) if args.json else describe_lines(lines))
    if not told["healthy"]:
        raise SystemExit(1)
