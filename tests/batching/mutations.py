"""Ways to break the promises of the planned epoch, as edits of its source: the material of `python -m tests.batching.mutate`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One way to break a promise.

    Attributes:
        promise: what no longer holds.
        what: how it is broken.
        file: the file of `distrag/batching` that is edited.
        edits: text that has to stand there exactly once, and what takes its place.
    """

    promise: str
    what: str
    file: str
    edits: tuple[tuple[str, str], ...]


def _of(promise: str, what: str, file: str, old: str, new: str, *more: tuple[str, str]) -> Mutation:
    return Mutation(promise, what, file, ((old, new), *more))


_SPAN = "slice(int(pool.bounds[at]), int(pool.bounds[at + 1]))"
_SHARE = "np.compress(pool.ranks[span] == rank, pool.samples[span])"
_TAKE = "first, last = int(self._blocks[pool]), int(self._blocks[pool + 1])"
_BLOCK = "for i in range(start, min(start + block, n)):"
_DEAL = "deal_rows(weights[own], W, s % W, np.uint64(0), dealt)"
_NEXT = "for step in range(self._start, plan.num_steps):\n"
_BUILD = "for step in range(start, plan.num_steps):\n"
_KEY = "key=np.array([seed % 2**64, epoch % 2**64], np.uint64)"
_USED = 'for step in range(first, min(part["until"], plan.num_steps)):'
_PARTS = '"parts": [*self._before, {"options": self._options, "until": steps_done}]'
_READ = "yield StepSamples(plan.samples(step, self.rank)"
_OWN = "own[table[length]] += length"

EACH_ONCE = (
    _of("a sample is dropped", "each step without its last", "plan.py", _SPAN, _SPAN.replace("at + 1])", "at + 1]) - 1")),
    _of(
        "a sample is repeated",
        "each step with the last one before it",
        "plan.py",
        _SPAN,
        _SPAN.replace("int(pool.bounds[at])", "max(int(pool.bounds[at]) - 1, 0)"),
    ),
    _of("a sample is repeated", "ranks take those of lower ranks too", "plan.py", _SHARE, _SHARE.replace("==", "<=")),
    _of(
        "a dummy is a real sample",
        "a rank without samples takes the step's first",
        "plan.py",
        f"return {_SHARE}",
        f"own = {_SHARE}\n        return own if len(own) else pool.samples[span][:1]",
    ),
    _of(
        "pools meet without a gap",
        "the first block of a pool is left out",
        "layout.py",
        _TAKE,
        _TAKE.replace("[pool])", "[pool]) + (pool > 0)"),
    ),
    _of(
        "pools meet without a gap",
        "a pool takes the next one's first block",
        "layout.py",
        _TAKE,
        _TAKE.replace("int(self._blocks[pool + 1])", "min(int(self._blocks[pool + 1]) + 1, len(self._order))"),
    ),
    _of(
        "pools meet without a gap", "the first step of a pool is one more of the last", "layout.py", 'side="right"', 'side="left"'
    ),
    _of(
        "the last block is whole too",
        "it is dropped where it is not full",
        "survey.py",
        _BLOCK,
        _BLOCK.replace("min(start + block, n)", "start + block if start + block <= n else start"),
    ),
    _of(
        "the last block is whole too",
        "its tokens are not counted",
        "survey.py",
        "for i in range(b * block, min((b + 1) * block, n)):",
        "for i in range(b * block, (b + 1) * block if (b + 1) * block <= n else b * block):",
    ),
)

CAPS = (
    _of(
        "tokens of a rank",
        "one above the cap, by rows",
        "pool.py",
        "tokens.max() <= rules.rank_tokens",
        "tokens.max() <= rules.rank_tokens + 1",
    ),
    _of("tokens of a rank", "one above the cap, packed", "deal.py", "room[heap[0]] < length", "room[heap[0]] + 1 < length"),
    _of(
        "samples of a rank",
        "one above the cap, by rows",
        "pool.py",
        "samples.max() <= rules.rank_samples",
        "samples.max() <= min(rules.rank_samples, 1 << 40) + 1",
    ),
    _of("samples of a rank", "one above the cap, packed", "deal.py", "if count[rank] == 0 or", "if count[rank] == -1 or"),
    _of("samples of a rank", "no cap unless one is given", "plan.py", "max_samples or max_tokens)", "max_samples or NO_CAP)"),
    _of("tokens of a global step", "one above the cap", "pool.py", "tokens > rules.step_tokens or", "tokens > rules.step_tokens + 1 or"),
    _of(
        "samples of a global step",
        "one above the cap",
        "pool.py",
        "bounds[s + 1] - bounds[s] > rules.step_samples",
        "bounds[s + 1] - bounds[s] > rules.step_samples + 1",
    ),
)

ANY_WORLD = (
    _of(
        "global steps do not depend on the world size",
        "units of as many",
        "pool.py",
        "        unit = 1\n",
        "        unit = rules.world_size\n",
    ),
    _of(
        "global steps do not depend on the world size",
        "it goes into the draw",
        "layout.py",
        _KEY,
        _KEY.replace("[seed %", "[(seed + rules.world_size) %"),
    ),
    _of(
        "global steps do not depend on the cost",
        "evened out in cost",
        "pool.py",
        "weigh(tokens, (0.0, 0.0, 0.0))",
        "weigh(tokens, rules.cost)",
    ),
)

EQUAL_STEPS = (
    _of(
        "all ranks have equal steps",
        "the sampler leaves out empty ones",
        "sampler.py",
        _NEXT,
        _NEXT + "            if not len(plan.samples(step, self.rank)):\n                continue\n",
    ),
    _of(
        "all ranks have equal steps",
        "the loader leaves out empty ones",
        "loader.py",
        _BUILD,
        _BUILD + "            if not len(plan.samples(step, rank)):\n                continue\n",
    ),
    _of("num_steps is exact", "one too many", "plan.py", "first_step + layout.num_steps,", "first_step + layout.num_steps + 1,"),
    _of(
        "num_steps is exact",
        "one too few",
        "plan.py",
        "first_step + layout.num_steps,",
        "first_step + layout.num_steps - (layout.num_steps > 1),",
    ),
    _of("num_steps is at least what is asked", "not asked", "plan.py", "num_steps=num_steps or 0", "num_steps=0"),
    _of(
        "len() is what is left",
        "the whole epoch after a resume",
        "sampler.py",
        "return self.plan.num_steps - self._start",
        "return self.plan.num_steps - self.plan.first_step",
    ),
)

BALANCE = (
    _of(
        "ranks are even in cost",
        "rows are weighed by tokens",
        "rows.py",
        "by_price = WHOLE / 2 / price if price > 0.0 else 0.0",
        "by_price = 0.0",
    ),
    _of(
        "ranks are even in cost",
        "single samples are weighed by tokens",
        "deal.py",
        "price = cost[0] * length + cost[1] * length * length + cost[2]",
        "price = 1.0 * length",
    ),
    _of(
        "ranks are even in cost",
        "rows are judged by tokens",
        "pool.py",
        "load[dealt[i]] += a * length + b * float(length) * length + c",
        "load[dealt[i]] += 1.0 * length",
    ),
    _of("ranks are even in cost", "never sample by sample", "pool.py", "not (fits and worst <= FINE)", "not fits"),
    _of(
        "ranks are even in tokens",
        "rows are weighed by cost",
        "rows.py",
        "by_token = WHOLE / 2 / tokens if tokens > 0.0 else 0.0",
        "by_token = 0.0",
    ),
    _of("ranks are even in tokens", "round robin", "pool.py", _DEAL, _DEAL.replace("weights[own]", "np.zeros(len(own), np.int64)")),
    _of(
        "the last step is balanced too",
        "its longest samples go to its first rank",
        "pool.py",
        f"            {_DEAL}\n",
        f"            {_DEAL}\n        if s == len(bounds) - 2:\n            dealt = np.arange(len(own)) * W // len(own)\n",
        ("not (fits and worst <= FINE)", "not (fits and (worst <= FINE or s == len(bounds) - 2))"),
    ),
    _of(
        "steps are of about equal tokens",
        "the last pool gets less",
        "layout.py",
        "ends[1:-1] / ends[-1] *",
        "ends[1:-1] / (ends[-1] - 0.5) *",
    ),
    _of("steps have about the same lengths", "nothing is sorted", "rows.py", "index[counts[c]] = i", "index[i] = i"),
    _of(
        "steps have about the same lengths",
        "bins are drawn blindly",
        "rows.py",
        "if spread > 0:\n",
        "if True:\n                spread = WHOLE\n",
    ),
    _of("ranks that are packed are even", "any bins share a step", "pool.py", "used[np.argsort(-load[used])]", "used"),
    _of(
        "like lengths are bucketed",
        "bucket_steps ignored",
        "pool.py",
        "groups = (num_steps + rules.bucket_steps - 1) // rules.bucket_steps",
        "groups = num_steps",
    ),
)

SHUFFLE = (
    _of(
        "pools differ every epoch",
        "drawn by the seed alone",
        "layout.py",
        "shuffle_in_place(order, random.integers(1, 2**64, dtype=np.uint64))",
        "shuffle_in_place(order, np.uint64(seed % 2**63 + 1))",
    ),
    _of(
        "the order of steps differs every epoch",
        "as they were dealt",
        "pool.py",
        "state = shuffle(turn, next_random(state))",
        "state = next_random(state)",
    ),
    _of(
        "the order of steps differs every epoch",
        "one pool has one state",
        "layout.py",
        "_states=random.integers(1, 2**64, 1, dtype=np.uint64)",
        "_states=np.ones(1, np.uint64)",
    ),
    _of("the dealing differs every epoch", "the heaviest to rank 0, by rows", "pool.py", _DEAL, _DEAL.replace("s % W", "0")),
    _of("the dealing differs every epoch", "the dearest to rank 0, sample by sample", "pool.py", "s % W, other)", "0, other)"),
    _of("another seed is another order", "the seed is ignored", "layout.py", _KEY, _KEY.replace("seed % 2**64", "0")),
    _of("another epoch is another order", "the epoch is ignored", "layout.py", _KEY, _KEY.replace("epoch % 2**64", "0")),
    _of("neighbours part", "a block stays in its order", "layout.py", "if self._block > 1 and state:", "if False:"),
    _of(
        "shuffle=False draws nothing",
        "blocks are drawn",
        "layout.py",
        "    if shuffle:\n        shuffle_in_place",
        "    if True:\n        shuffle_in_place",
    ),
    _of(
        "shuffle=False draws nothing",
        "steps are drawn",
        "layout.py",
        "    if n <= 2 * pool_samples and shuffle:",
        "    if n <= 2 * pool_samples:",
    ),
)

LAZY = (
    _of(
        "a pool that is promised fits",
        "the fullest bin holds the mean",
        "survey.py",
        "before // num_bins + top[c])",
        "before // num_bins)",
    ),
    _of("a pool that is promised fits", "classes seem one shorter", "survey.py", "(c + 32736) << 47", "(c + 32735) << 47"),
    _of("a pool that is promised fits", "rows need only the mean", "layout.py", "+ 2 * need.longest < cap_tokens", "<= cap_tokens"),
    _of("a pool that is promised fits", "by rows whatever the samples", "layout.py", " and rows <= cap_samples", ""),
    _of("a pool that is promised fits", "packed whatever the samples", "layout.py", "packed = cap_samples >= cap_tokens and", "packed ="),
    _of(
        "a pool that is promised fits",
        "whole steps fit any ranks in tokens",
        "layout.py",
        "rules.step_tokens // rules.world_size + need.longest > rules.rank_tokens",
        "False",
    ),
    _of(
        "a pool that is promised fits",
        "whole steps fit any ranks in samples",
        "layout.py",
        "-(-rules.step_samples // rules.world_size) > rules.rank_samples",
        "False",
    ),
    _of(
        "a pool that is promised fits",
        "lengths wrap at 65,536",
        "survey.py",
        f"if length < len(table):\n                {_OWN}",
        f"if True:\n                {_OWN.replace('[length]', '[length & 65535]')}",
    ),
    _of(
        "any step comes alike however it is reached",
        "pools before it go into the draw",
        "plan.py",
        "steps_of(number), state, True)",
        "steps_of(number), np.uint64(int(state) ^ len(self._pools)), True)",
    ),
)

RESUME = (
    _of("the rest is exactly what is unused", "with the last step used", "sampler.py", _USED, _USED.replace('["until"]', '["until"] - 1')),
    _of(
        "the rest is exactly what is unused",
        "without the first one unused",
        "sampler.py",
        _USED,
        _USED.replace('["until"]', '["until"] + 1'),
    ),
    _of(
        "what was read ahead is not used",
        "the state counts what was yielded",
        "sampler.py",
        _READ,
        f"self._read = step + 1\n            {_READ}",
        ('"steps_done": steps_done,', '"steps_done": max(steps_done, getattr(self, "_read", 0)),'),
    ),
    _of("a second resume knows the first", "the state forgets parts", "sampler.py", _PARTS, _PARTS.replace("*self._before, ", "")),
    _of("after an epoch's end comes the next", "the epoch again", "sampler.py", "if done >= self._plan.num_steps and", "if False and"),
    _of(
        "the epoch after a resume is whole",
        "only what was left",
        "sampler.py",
        "if epoch != self.epoch:\n            self._start, self._before = 0, []",
        "if epoch != self.epoch:\n            self._start = 0",
    ),
    _of(
        "changed data is refused",
        "its hash is not compared",
        "sampler.py",
        'self._check_data("The data is not',
        'str("The data is not',
        ('of the state", state.get("content_hash", ""), self._content_hash)', 'of the state")'),
    ),
    _of(
        "changed data is refused",
        "its lengths are not compared",
        "sampler.py",
        'self._check_data("The lengths are not',
        'str("The lengths are not',
        ('of the state", state.get("fingerprint", ""), self._plan.fingerprint)', 'of the state")'),
    ),
    _of("steps are numbered on", "from 0", "sampler.py", 'first = self._before[-1]["until"] if self._before else 0', "first = 0"),
    _of("the state decides the seed", "the sampler's own", "sampler.py", 'self.seed = state["seed"]', 'str(state["seed"])'),
    _of("other ranks plan the rest anew", "as if they were the same", "sampler.py", 'if options["global_tokens"] is None:', "if False:"),
    _of(
        "a global budget goes on step by step", "the rest is planned anew", "sampler.py", 'if options["global_tokens"] is None:', "if True:"
    ),
    _of("the same ranks go on bit for bit", "the rest is planned anew", "sampler.py", "parts.pop()", "str(parts)"),
    _of("a resumed loader goes on", "from the first step", "loader.py", "(plan, self.sampler.start, view", "(plan, plan.first_step, view"),
    _of(
        "a later set_epoch waits for the next epoch",
        "it reaches into the loader's thread",
        "loader.py",
        _BUILD,
        _BUILD + "            plan = self.sampler.plan\n",
    ),
    _of(
        "counts are of the global step",
        "of this rank",
        "loader.py",
        "plan.step_sum(step, counts)",
        "float(counts[plan.samples(step, rank)].sum())",
    ),
)

LENGTHS = (
    _of(
        "lengths are read as they are",
        "int64 wraps",
        "plan.py",
        "sizes = np.asarray(lengths)",
        "sizes = np.asarray(lengths).astype(np.int32)",
    ),
    _of(
        "lengths are read as they are",
        "the tokens of a step wrap",
        "plan.py",
        "self._lengths[self.step_samples(step)].sum())",
        "self._lengths[self.step_samples(step)].sum(dtype=self._lengths.dtype))",
    ),
    _of(
        "lengths are read as they are",
        "the tokens of an epoch wrap",
        "survey.py",
        "total += tokens",
        "total = np.int64(np.int32(total + tokens))",
    ),
    _of("a negative length is refused", "-1 is not", "layout.py", "if shortest < 0:", "if shortest < -1:"),
    _of("a length above the budget is refused", "one more is not", "layout.py", "if longest > budget:", "if longest > budget + 1:"),
)

PACKED = (
    _of("tight caps are packed", "a step's bins at one rank", "pool.py", "(at - first + s) % W", "s % W"),
    _of("tight caps are packed", "they never are", "pool.py", "if not may_pack:", "if True:"),
    _of("tight caps are packed", "what has no room goes to the last bin", "pool.py", "if bins.min() < 0:", "if bins.min() < -1:"),
    _of("tight caps are packed", "a full rank hides the others", "deal.py", "size = _push(heap, size, load, spare[s])", "size += 0"),
)

MUTATIONS = (*EACH_ONCE, *CAPS, *ANY_WORLD, *EQUAL_STEPS, *BALANCE, *SHUFFLE, *LAZY, *RESUME, *LENGTHS, *PACKED)
