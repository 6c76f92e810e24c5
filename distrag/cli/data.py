"""`distrag prepare | stats`."""

from __future__ import annotations

from distrag.cli.words import command_parser


def run_prepare(words: list[str]) -> None:
    """Runs `distrag prepare`."""
    parser = command_parser("prepare")
    parser.add_argument("source", nargs="+", help="Parquet or CSV files, folders, globs; a schema YAML; ml-100k; synthetic")
    parser.add_argument("--out", required=True, help="folder of the store")
    parser.add_argument("--schema", help="YAML that names features; what it does not say is inferred")
    parser.add_argument("--on-unknown", choices=("count", "error"), default="count", help="bad ids: row 0 and counted, or refused")
    parser.add_argument("--user", help="column of the user in a CSV of events")
    parser.add_argument("--item", help="column of the item in a CSV of events")
    parser.add_argument("--time", help="column of the time in a CSV of events")
    parser.add_argument("--header", nargs="+", help="names of the columns of a CSV without a header line")
    parser.add_argument("--overwrite", action="store_true", help="replace another store at --out")
    parser.add_argument("--path", help="ml-100k: folder or file that has it; otherwise it is fetched")
    parser.add_argument("--num-samples", type=int, help="synthetic: rows")
    parser.add_argument("--num-items", type=int, help="synthetic: items")
    parser.add_argument("--seed", type=int, help="synthetic: seed")
    args = parser.parse_args(words)
    from distrag.data.prepare import prepare
    from distrag.data.sources import MovieLensConfig, SyntheticConfig

    made = {"num_samples": args.num_samples, "num_items": args.num_items, "seed": args.seed}
    schema = prepare(
        args.source[0] if len(args.source) == 1 else args.source,
        args.out,
        schema=args.schema,
        overwrite=args.overwrite,
        on_unknown=args.on_unknown,
        user=args.user,
        item=args.item,
        time=args.time,
        header=args.header,
        ml_100k=MovieLensConfig(path=args.path) if args.path else None,
        synthetic=SyntheticConfig(**{key: value for key, value in made.items() if value is not None}),
    )
    tables = ", ".join(f"{table.name} ({table.num_rows:,} rows)" for table in schema.tables)
    print(f"{args.out}: {schema.num_samples:,} samples, {schema.num_positions:,} positions; hash {schema.content_hash[:12]}")
    print(
        f"tables: {tables or 'none, so there is nothing to rank: a column of floats is read as numbers, unless a schema says `kind: id`'}"
    )
    odd = [
        f"{f.name} {f.num_unknown:,} unknown, {f.num_null:,} null"
        for f in (*schema.history, *schema.context)
        if f.num_unknown or f.num_null
    ]
    if odd:
        print("unknown ids are row 0, null numbers the mean, null times the time before: " + "; ".join(odd))


def run_stats(words: list[str]) -> None:
    """Runs `distrag stats`."""
    parser = command_parser("stats")
    parser.add_argument("store", help="folder that `distrag prepare` wrote")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare it with the content hash first")
    args = parser.parse_args(words)
    from distrag.data.profile import stats
    from distrag.data.store import open_store

    if args.verify:
        open_store(args.store, verify=True)
    stats(args.store, json=args.json)
