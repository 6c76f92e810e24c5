"""Ways to break what the sampler, the loader and nodes promise of an epoch."""

from __future__ import annotations

from tests.batching.mutations import broken

_NEXT = "for step in range(self._start, plan.num_steps):\n"
_BUILD = "for step in range(start, plan.num_steps):\n"
_USED = 'for step in range(first, min(part["until"], plan.num_steps)):'
_PARTS = '"parts": [*self._before, {"options": self._options, "until": steps_done}]'
_READ = "yield StepSamples(plan.samples(step, self.rank)"

EQUAL_STEPS = (
    broken(
        "all ranks have equal steps",
        "the sampler leaves out empty ones",
        "sampler.py",
        _NEXT,
        _NEXT + "            if not len(plan.samples(step, self.rank)):\n                continue\n",
    ),
    broken(
        "all ranks have equal steps",
        "the loader leaves out empty ones",
        "loader.py",
        _BUILD,
        _BUILD + "            if not len(plan.samples(step, rank)):\n                continue\n",
    ),
    broken(
        "len() is what is left",
        "the whole epoch after a resume",
        "sampler.py",
        "return self.plan.num_steps - self._start",
        "return self.plan.num_steps - self.plan.first_step",
    ),
)

RESUME = (
    broken(
        "the rest is exactly what is unused", "with the last step used", "sampler.py", _USED, _USED.replace('["until"]', '["until"] - 1')
    ),
    broken(
        "the rest is exactly what is unused",
        "without the first one unused",
        "sampler.py",
        _USED,
        _USED.replace('["until"]', '["until"] + 1'),
    ),
    broken(
        "what was read ahead is not used",
        "the state counts what was yielded",
        "sampler.py",
        _READ,
        f"self._read = step + 1\n            {_READ}",
        ('"steps_done": steps_done,', '"steps_done": max(steps_done, getattr(self, "_read", 0)),'),
    ),
    broken("a second resume knows the first", "the state forgets parts", "sampler.py", _PARTS, _PARTS.replace("*self._before, ", "")),
    broken("after an epoch's end comes the next", "the epoch again", "sampler.py", "if done >= self._plan.num_steps and", "if False and"),
    broken(
        "the epoch after a resume is whole",
        "only what was left",
        "sampler.py",
        "            self._before = []\n        super().set_epoch(epoch)",
        "        super().set_epoch(epoch)",
    ),
    broken(
        "changed data is refused",
        "its hash is not compared",
        "sampler.py",
        'of the state", state["content_hash"], self._content_hash)',
        'of the state", "", "")',
    ),
    broken(
        "changed data is refused",
        "its lengths are not compared",
        "sampler.py",
        'of the state", state["fingerprint"], self._plan.fingerprint)',
        'of the state", "", "")',
    ),
    broken("a refused state moves nothing", "it is half loaded", "sampler.py", "self.__dict__.update(kept)", "str(kept)"),
    broken(
        "a damaged state is refused", "more steps than the epoch has", "sampler.py", "if done > self._plan.num_steps and", "if False and"
    ),
    broken(
        "the epoch after a resume is whole",
        "the plan of the rest where nothing is drawn",
        "sampler.py",
        "self.shuffle or self._stale or",
        "self.shuffle or",
    ),
    broken("steps are numbered on", "from 0", "sampler.py", 'first = self._before[-1]["until"] if self._before else 0', "first = 0"),
    broken("the state decides the seed", "the sampler's own", "sampler.py", 'self.seed = state["seed"]', 'str(state["seed"])'),
    broken("other ranks plan the rest anew", "as if they were the same", "sampler.py", 'if options["global_tokens"] is None:', "if False:"),
    broken(
        "a global budget goes on step by step", "the rest is planned anew", "sampler.py", 'if options["global_tokens"] is None:', "if True:"
    ),
    broken("the same ranks go on bit for bit", "the rest is planned anew", "sampler.py", "parts.pop()", "str(parts)"),
    broken(
        "a resumed loader goes on", "from the first step", "loader.py", "(plan, self.sampler.start, view", "(plan, plan.first_step, view"
    ),
    broken(
        "a later set_epoch waits for the next epoch",
        "it reaches into the loader's thread",
        "loader.py",
        _BUILD,
        _BUILD + "            plan = self.sampler.plan\n",
    ),
    broken(
        "counts are of the global step",
        "of this rank",
        "loader.py",
        "plan.step_sum(step, counts)",
        "float(counts[plan.samples(step, rank)].sum())",
    ),
)

NODES = (
    broken(
        "a sample is of one node",
        "borders one too far",
        "nodes.py",
        "np.searchsorted(node_of[numbers][order], np.arange(1, num_nodes))",
        "np.searchsorted(node_of[numbers][order], np.arange(1, num_nodes)) + 1",
    ),
    broken(
        "a rank takes its own node's samples",
        "those of the first node",
        "nodes.py",
        "get(rank // self._local_size * self._local_size)",
        "get(0)",
    ),
    broken("nodes have equal steps", "each as many as it needs", "nodes.py", "if first_step < plan.num_steps < most:", "if False:"),
    broken("other nodes plan the rest anew", "as if they were the same", "sampler.py", ', "cost", "num_nodes"]', ', "cost"]'),
)

OF_THE_EPOCH = (*EQUAL_STEPS, *RESUME, *NODES)
