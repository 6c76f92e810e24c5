"""Ways to break what the plan of an epoch promises."""

from __future__ import annotations

from tests.batching.mutations import broken

_SPAN = "slice(int(pool.bounds[at]), int(pool.bounds[at + 1]))"
_SHARE = "np.compress(pool.ranks[span] == rank, pool.samples[span])"
_TAKE = "first, last = int(self._blocks[pool]), int(self._blocks[pool + 1])"
_BLOCK = "for i in range(start, min(start + block, n)):"
_DEAL = "deal_rows(weights[own], W, s % W, np.uint64(0), dealt)"
_KEY = "key=np.array([seed % 2**64, epoch % 2**64], np.uint64)"
_OWN = "own[table[length]] += length"

EACH_ONCE = (
    broken("a sample is dropped", "each step without its last", "plan.py", _SPAN, _SPAN.replace("at + 1])", "at + 1]) - 1")),
    broken(
        "a sample is repeated",
        "each step with the last one before it",
        "plan.py",
        _SPAN,
        _SPAN.replace("int(pool.bounds[at])", "max(int(pool.bounds[at]) - 1, 0)"),
    ),
    broken("a sample is repeated", "ranks take those of lower ranks too", "plan.py", _SHARE, _SHARE.replace("==", "<=")),
    broken(
        "a dummy is a real sample",
        "a rank without samples takes the step's first",
        "plan.py",
        f"return {_SHARE}",
        f"own = {_SHARE}\n        return own if len(own) else pool.samples[span][:1]",
    ),
    broken(
        "pools meet without a gap",
        "the first block of a pool is left out",
        "layout.py",
        _TAKE,
        _TAKE.replace("[pool])", "[pool]) + (pool > 0)"),
    ),
    broken(
        "pools meet without a gap",
        "a pool takes the next one's first block",
        "layout.py",
        _TAKE,
        _TAKE.replace("int(self._blocks[pool + 1])", "min(int(self._blocks[pool + 1]) + 1, len(self._order))"),
    ),
    broken("pools meet without a gap", "the first step of a pool is one more of the last", "layout.py", 'side="right"', 'side="left"'),
    broken(
        "the last block is whole too",
        "it is dropped where it is not full",
        "survey.py",
        _BLOCK,
        _BLOCK.replace("min(start + block, n)", "start + block if start + block <= n else start"),
    ),
    broken(
        "the last block is whole too",
        "its tokens are not counted",
        "survey.py",
        "for i in range(b * block, min((b + 1) * block, n)):",
        "for i in range(b * block, (b + 1) * block if (b + 1) * block <= n else b * block):",
    ),
)

CAPS = (
    broken(
        "tokens of a rank",
        "one above the cap, by rows",
        "pool.py",
        "tokens.max() <= rules.rank_tokens",
        "tokens.max() <= rules.rank_tokens + 1",
    ),
    broken("tokens of a rank", "one above the cap, packed", "deal.py", "room[heap[0]] < length", "room[heap[0]] + 1 < length"),
    broken(
        "samples of a rank",
        "one above the cap, by rows",
        "pool.py",
        "samples.max() <= rules.rank_samples",
        "samples.max() <= min(rules.rank_samples, 1 << 40) + 1",
    ),
    broken("samples of a rank", "one above the cap, packed", "deal.py", "if count[rank] == 0 or", "if count[rank] == -1 or"),
    broken("samples of a rank", "no cap unless one is given", "plan.py", "max_samples or max_tokens)", "max_samples or NO_CAP)"),
    broken("tokens of a rank", "one above the cap, swapped", "polish.py", "more <= room[0] and", "more <= room[0] + 1 and"),
    broken("tokens of a rank", "one above the cap, swapped back", "polish.py", "and -more <= room[1]", "and -more <= room[1] + 1"),
    broken("samples of a rank", "one above the cap, swapped", "polish.py", "few < max_samples)", "few <= max_samples)"),
    broken("tokens of a global step", "one above the cap", "pool.py", "tokens > rules.step_tokens or", "tokens > rules.step_tokens + 1 or"),
    broken(
        "samples of a global step",
        "one above the cap",
        "pool.py",
        "bounds[s + 1] - bounds[s] > rules.step_samples",
        "bounds[s + 1] - bounds[s] > rules.step_samples + 1",
    ),
)

ANY_WORLD = (
    broken(
        "global steps do not depend on the world size",
        "units of as many",
        "pool.py",
        "        unit = 1\n",
        "        unit = rules.world_size\n",
    ),
    broken(
        "global steps do not depend on the world size",
        "it goes into the draw",
        "layout.py",
        _KEY,
        _KEY.replace("[seed %", "[(seed + rules.world_size) %"),
    ),
    broken(
        "global steps do not depend on the cost",
        "evened out in cost",
        "pool.py",
        "weigh(tokens, (0.0, 0.0, 0.0))",
        "weigh(tokens, rules.cost)",
    ),
)

NUM_STEPS = (
    broken("num_steps is exact", "one too many", "plan.py", "first_step + layout.num_steps,", "first_step + layout.num_steps + 1,"),
    broken(
        "num_steps is exact",
        "one too few",
        "plan.py",
        "first_step + layout.num_steps,",
        "first_step + layout.num_steps - (layout.num_steps > 1),",
    ),
    broken("num_steps is at least what is asked", "not asked", "plan.py", "num_steps=num_steps or 0", "num_steps=0"),
)

BALANCE = (
    broken(
        "ranks are even in cost",
        "rows are weighed by tokens",
        "rows.py",
        "by_price = WHOLE / 2 / prices if prices > 0.0 else 0.0",
        "by_price = 0.0",
    ),
    broken(
        "ranks are even in cost",
        "single samples are weighed by tokens",
        "deal.py",
        "paid = price(float(length), cost)",
        "paid = 1.0 * length",
    ),
    broken(
        "ranks are even in cost",
        "rows are judged by tokens",
        "pool.py",
        "load[dealt[i]] += price(float(length), rules.cost)",
        "load[dealt[i]] += 1.0 * float(length)",
    ),
    broken("ranks are even in cost", "nothing is swapped", "pool.py", "if W > 1 and worst > fine:", "if False:"),
    broken(
        "ranks are even in cost",
        "swaps look at tokens alone",
        "polish.py",
        "share[1, i] = price(float(lengths[i]), cost)",
        "share[1, i] = 1.0",
    ),
    broken("ranks are even in tokens", "swaps look at cost alone", "polish.py", "share[0, i] = float(lengths[i])", "share[0, i] = 1.0"),
    broken("ranks are even in tokens", "only cost is judged", "pool.py", "if tokens.sum() > 0:", "if False:"),
    broken(
        "ranks that are packed are even", "nothing is swapped", "pool.py", "        _polish_all(lengths, rules, index, bounds, ranks)\n", ""
    ),
    broken("ranks are even in cost", "never sample by sample", "pool.py", "not (fits and worst <= GOOD)", "not fits"),
    broken(
        "ranks are even in tokens",
        "rows are weighed by cost",
        "rows.py",
        "by_token = WHOLE / 2 / tokens if tokens > 0.0 else 0.0",
        "by_token = 0.0",
    ),
    broken("ranks are even in tokens", "round robin", "pool.py", _DEAL, _DEAL.replace("weights[own]", "np.zeros(len(own), np.int64)")),
    broken(
        "the last step is balanced too",
        "its longest samples go to its first rank",
        "pool.py",
        f"            {_DEAL}\n",
        f"            {_DEAL}\n        if s == len(bounds) - 2:\n            dealt = np.arange(len(own)) * W // len(own)\n",
        ("if W > 1 and worst > fine:", "if W > 1 and worst > fine and s < len(bounds) - 2:"),
        ("not (fits and worst <= GOOD)", "not (fits and (worst <= GOOD or s == len(bounds) - 2))"),
    ),
    broken(
        "steps are of about equal tokens",
        "the last pool gets less",
        "layout.py",
        "ends[1:-1] / ends[-1] *",
        "ends[1:-1] / (ends[-1] - 0.5) *",
    ),
    broken("steps have about the same lengths", "nothing is sorted", "rows.py", "index[counts[c]] = i", "index[i] = i"),
    broken(
        "steps have about the same lengths",
        "bins are drawn blindly",
        "rows.py",
        "if spread > 0:\n",
        "if True:\n                spread = WHOLE\n",
    ),
    broken("ranks that are packed are even", "any bins share a step", "pool.py", "used[np.argsort(-load[used])]", "used"),
    broken(
        "like lengths are bucketed",
        "bucket_steps ignored",
        "pool.py",
        "groups = (num_steps + rules.bucket_steps - 1) // rules.bucket_steps",
        "groups = num_steps",
    ),
)

SHUFFLE = (
    broken(
        "pools differ every epoch",
        "drawn by the seed alone",
        "layout.py",
        "shuffle_in_place(order, random.integers(1, 2**64, dtype=np.uint64) if shuffle else _FIXED)",
        "shuffle_in_place(order, np.uint64(seed % 2**63 + 1))",
    ),
    broken(
        "the order of steps differs every epoch",
        "as they were dealt",
        "pool.py",
        "state = shuffle(turn, next_random(state))",
        "state = next_random(state)",
    ),
    broken(
        "the order of steps differs every epoch",
        "one pool has one state",
        "layout.py",
        "_states=random.integers(1, 2**64, 1, dtype=np.uint64)",
        "_states=np.ones(1, np.uint64)",
    ),
    broken("the dealing differs every epoch", "the heaviest to rank 0, by rows", "pool.py", _DEAL, _DEAL.replace("s % W", "0")),
    broken("the dealing differs every epoch", "the dearest to rank 0, sample by sample", "pool.py", "s % W, other)", "0, other)"),
    broken("another seed is another order", "the seed is ignored", "layout.py", _KEY, _KEY.replace("seed % 2**64", "0")),
    broken("another epoch is another order", "the epoch is ignored", "layout.py", _KEY, _KEY.replace("epoch % 2**64", "0")),
    broken("neighbours part", "a block stays in its order", "layout.py", "if self._block > 1 and state:", "if False:"),
    broken(
        "shuffle=False draws nothing",
        "blocks are drawn",
        "layout.py",
        "dtype=np.uint64) if shuffle else _FIXED)",
        "dtype=np.uint64))",
    ),
    broken(
        "shuffle=False draws nothing",
        "steps are drawn",
        "layout.py",
        "    if n <= 2 * pool_samples and shuffle:",
        "    if n <= 2 * pool_samples:",
    ),
)

LAZY = (
    broken(
        "a pool that is promised fits",
        "the fullest bin holds the mean",
        "survey.py",
        "before // num_bins + top[c])",
        "before // num_bins)",
    ),
    broken("a pool that is promised fits", "classes seem one shorter", "survey.py", "(c + 32736) << 47", "(c + 32735) << 47"),
    broken(
        "a pool that is promised fits", "rows need only the mean", "layout.py", "+ (spare + 1) * need.longest < cap_tokens", "<= cap_tokens"
    ),
    broken("a pool that is promised fits", "by rows whatever the samples", "layout.py", " and rows + spare - 1 <= cap_samples", ""),
    broken(
        "a pool that is promised fits", "packed whatever the samples", "layout.py", "packed = cap_samples >= cap_tokens and", "packed ="
    ),
    broken(
        "a pool that is promised fits",
        "whole steps fit any ranks in tokens",
        "layout.py",
        "rules.step_tokens // W + longest <= rules.rank_tokens",
        "True",
    ),
    broken(
        "a pool that is promised fits",
        "whole steps fit any ranks in samples",
        "layout.py",
        "-(-rules.step_samples // W) <= rules.rank_samples",
        "True",
    ),
    broken(
        "a pool that is promised fits",
        "lengths wrap at 65,536",
        "survey.py",
        f"if length < len(table):\n                {_OWN}",
        f"if True:\n                {_OWN.replace('[length]', '[length & 65535]')}",
    ),
    broken(
        "any step comes alike however it is reached",
        "pools before it go into the draw",
        "plan.py",
        "steps_of(number), state, True)",
        "steps_of(number), np.uint64(int(state) ^ len(self._pools)), True)",
    ),
)

LENGTHS = (
    broken(
        "lengths are read as they are",
        "int64 wraps",
        "plan.py",
        "sizes = as_lengths(lengths)",
        "sizes = as_lengths(lengths).astype(np.int32)",
    ),
    broken(
        "lengths are read as they are",
        "the tokens of a step wrap",
        "plan.py",
        "self._lengths[self.step_samples(step)].sum())",
        "self._lengths[self.step_samples(step)].sum(dtype=self._lengths.dtype))",
    ),
    broken(
        "lengths are read as they are",
        "the tokens of an epoch wrap",
        "survey.py",
        "total += tokens",
        "total = np.int64(np.int32(total + tokens))",
    ),
    broken("a negative length is refused", "-1 is not", "layout.py", "if shortest < 0:", "if shortest < -1:"),
    broken("a length above the budget is refused", "one more is not", "layout.py", "if longest > budget:", "if longest > budget + 1:"),
)

PACKED = (
    broken("tight caps are packed", "a step's bins at one rank", "pool.py", "(at - first + s) % W", "s % W"),
    broken("tight caps are packed", "they never are", "pool.py", "if not may_pack:", "if True:"),
    broken("tight caps are packed", "what has no room goes to the last bin", "pool.py", "if bins.min() < 0:", "if bins.min() < -1:"),
    broken("tight caps are packed", "a full rank hides the others", "deal.py", "size = _push(heap, size, load, spare[s])", "size += 0"),
)

OF_THE_PLAN = (*EACH_ONCE, *CAPS, *ANY_WORLD, *NUM_STEPS, *BALANCE, *SHUFFLE, *LAZY, *LENGTHS, *PACKED)
