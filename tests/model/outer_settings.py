"""Settings of the outer optimizers: keys, presets and bad input (co2-overlap.md, sections 4.5 and 14; sparse-loco.md).

Names are the keys of the JSON object, words are in lower case.
"""
import dataclasses
import math

WORDS = {
    "payload": ("delta", "params"),
    "rule": ("heavy_ball", "nesterov", "none"),
    "form": ("delta", "anchor_diff"),
    "penalty": ("none", "const", "gap_rel", "gap_ema", "gap_inner"),
    "granularity": ("global", "tensor", "element"),
    "clip": ("none", "coord", "norm", "rms"),
    "clip_units": ("param", "grad"),
    "merge": ("reset", "lerp", "add_progress", "pull"),
    "every_step": ("params", "gradients"),
    "nonfinite": ("skip_rank", "error", "pass"),
}
# Decided: PER_TENSOR is "tensor", as everywhere else in the library, or "per_tensor".
SAME_WORD = {"per_tensor": "tensor", "1bit": "onebit"}
GAPS = ("gap_rel", "gap_ema", "gap_inner")

# Of onebit: scale l2, a fragment as one vector, mode strict. Of topk: without shape tile and levels tensor.
BLOCK_CODECS = {"int8": (8, 256), "int4": (4, 128)}  # bits, elements of a block
CODECS = {
    "onebit": {},
    "bf16": {"residual": False},
    "fp16": {"residual": False},
    "int8": {"residual": True, "block": 256},
    "int4": {"residual": True, "block": 128},
    "topk": {"block": 4096, "k": 64, "bits": 2, "index": "ef", "error_decay": 1.0, "exchange": "gather", "k_server": 0,
             "average": "ranks", "dense_below": 0, "alone": "identity", "median_clip": False, "shape": "flat",
             "levels": "block"},
}
TOPK_WORDS = {"index": ("ef", "packed"), "exchange": ("gather", "two_phase"), "average": ("ranks", "contributors"),
              "alone": ("identity", "encode"), "shape": ("flat",), "levels": ("block",)}

# The table of 4.5 where it differs from the fields below; "delay" stands for a delay of one period.
PRESETS = {
    "co2": {"period": 48, "delay": "period", "beta": 0.2, "penalty": "gap_ema", "auto_floor": True, "clip": "rms"},
    "co2_paper": {"period": 48, "delay": "period", "form": "anchor_diff", "penalty": "gap_inner", "clip": "coord"},
    "delta_corrected": {"period": 48, "delay": "period", "beta": 0.2, "freshness": 1.0},
    "slowmo": {"payload": "params", "period": 48, "beta": 0.5, "lr_normalised": True},
    "local_sgd": {"payload": "params", "rule": "none"},
    "post_local_sgd": {"payload": "params", "rule": "none"},
    "bmuf": {"payload": "params"},
    "diloco": {"period": 500, "rule": "nesterov", "alpha": 0.7, "beta": 0.9},
    "delayed_diloco": {"period": 30, "delay": "period", "rule": "nesterov", "alpha": 0.4, "beta": 0.9},
    "eager_diloco": {"period": 30, "delay": "period", "rule": "nesterov", "alpha": 0.4, "beta": 0.9},
    "streaming_diloco": {"rule": "nesterov", "alpha": 0.4, "beta": 0.9, "merge": "lerp", "merge_a": 0.5},
    "overlap_local_sgd": {"payload": "params", "period": 48, "delay": "period", "beta": 0.7, "merge": "pull",
                          "merge_a": 0.6},
    "cocod": {"payload": "params", "period": 48, "delay": "period", "rule": "none", "merge": "add_progress"},
    "sparse_loco": {"period": 30, "rule": "none", "codec": {"type": "topk", "error_decay": 0.95}, "dense_rounds": 0},
}
REQUIRED = {"local_sgd": ("period",), "post_local_sgd": ("period",), "bmuf": ("period", "alpha", "beta"),
            "streaming_diloco": ("period", "delay", "fragments")}


def refuse(key, found, allowed):
    raise ValueError(f"{key}: found {found!r}, allowed is {allowed}")


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and not math.isnan(x)


def is_count(x, least):
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


@dataclasses.dataclass
class Settings:
    """Keys of 4.5. The defaults are what 4.5 says where its table is silent."""

    period: int = 0
    delay: int = 0
    payload: str = "delta"
    rule: str = "heavy_ball"
    form: str = "delta"
    alpha: float = 1.0
    beta: float = 0.0
    lr_normalised: bool = False
    penalty: str = "none"
    lambda_const: float = 1.0
    lambda_max: object = None  # None: 16 for form delta, 2 for anchor_diff (4.3)
    granularity: str = "global"
    auto_floor: bool = False
    eps: float = 1e-12
    consensus_scalars: bool = False
    clip: str = "none"
    phi: object = None  # None: 1 for coord and norm, 10 for rms (4.5)
    clip_units: str = "param"
    freshness: float = 0.0
    merge: str = "reset"
    merge_a: float = 0.0
    codec: object = None  # a word, or an object with "type"
    chunk_align: int = 512
    dense_rounds: int = 1
    fragments: object = None  # lists of tensor indices; None: one of all
    switch_step: int = 0
    warmup_steps: int = 0
    every_step: str = "params"
    # Decided: the policy of section 14 has no key in 4.5; it is called nonfinite here.
    nonfinite: str = "skip_rank"

    def __post_init__(self):
        for key in WORDS:
            word = getattr(self, key)
            if isinstance(word, str):
                setattr(self, key, SAME_WORD.get(word.lower(), word.lower()))
        if self.lambda_max is None:
            self.lambda_max = 2.0 if self.form == "anchor_diff" else 16.0
        if self.phi is None:
            self.phi = 10.0 if self.clip == "rms" else 1.0
        if isinstance(self.codec, str):
            self.codec = None if self.codec == "none" else {"type": self.codec}
        if isinstance(self.codec, dict):
            kind = SAME_WORD.get(self.codec.get("type"), self.codec.get("type"))
            self.codec = {**CODECS.get(kind, {}), **self.codec, "type": kind}

    @property
    def delayed(self):
        """The average is used one whole period later."""
        return self.delay == self.period

    @property
    def snapshot_before_update(self):
        """Order of a step that launches and consumes (section 3); false for a delay below the period."""
        return self.delayed and self.merge in ("reset", "lerp")

    @property
    def consensus(self):
        """Lambda comes from the gap of rank 0, a round old (4.3); forced in one case (section 5)."""
        return self.consensus_scalars or (0 < self.freshness < 1 and self.penalty in GAPS)

    @property
    def floor(self):
        """The gain limiter of 4.3; 0: none.

        Decided: it is taken from the raw alpha, also with lr_normalised, where alpha is a gain as well.
        """
        on = self.auto_floor and self.form == "delta" and self.delayed
        return 1.25 * self.alpha / (1.0 - self.beta) if on else 0.0

    @property
    def early_steps(self):
        """Inner steps that synchronise every time: post-local (6) or warm-up (9.4)."""
        return max(self.switch_step, self.warmup_steps)

    def validate(self, world=1):
        """Raises ValueError that names the key, what was found and what is allowed (14)."""
        for key, words in WORDS.items():
            if getattr(self, key) not in words:
                refuse(key, getattr(self, key), ", ".join(words))
        self.check_numbers()
        self.check_schedule()
        self.check_combinations()
        if self.codec is not None:
            self.check_codec(world)
        return self

    def check_numbers(self):
        """Each number by itself."""
        def check(key, ok, allowed):
            if not (is_number(getattr(self, key)) and ok(getattr(self, key))):
                refuse(key, getattr(self, key), allowed)
        check("alpha", lambda x: 0 < x < math.inf, "a number above 0")
        check("beta", lambda x: 0 <= x < 1, "[0, 1)")
        check("phi", lambda x: x >= 0, "a number from 0 on")
        check("freshness", lambda x: 0 <= x <= 1, "[0, 1]")
        check("merge_a", lambda x: 0 <= x <= 1, "[0, 1]")
        check("eps", lambda x: 0 <= x < math.inf, "a number from 0 on")
        # Decided: a penalty below 1 would enlarge G, which 4.3 excludes ("Required properties", "Sign").
        check("lambda_const", lambda x: 1 <= x < math.inf, "a number from 1 on")
        check("lambda_max", lambda x: x >= 1, "a number from 1 on")
        for key, least in (("period", 1), ("delay", 0), ("chunk_align", 8), ("dense_rounds", 0), ("switch_step", 0),
                           ("warmup_steps", 0)):
            if not is_count(getattr(self, key), least):
                refuse(key, getattr(self, key), f"an integer from {least} on")
        if self.chunk_align % 8:
            refuse("chunk_align", self.chunk_align, "a multiple of 8")
        for key in ("lr_normalised", "auto_floor", "consensus_scalars"):
            if not isinstance(getattr(self, key), bool):
                refuse(key, getattr(self, key), "true, false")

    def check_schedule(self):
        """Delays that the merges allow (section 3), fragments, the start."""
        if self.delay > self.period:
            refuse("delay", self.delay, f"0 to period, {self.period}")
        if self.merge == "add_progress" and self.delay == 0:
            refuse("delay", 0, f"1 to period, {self.period}, with merge add_progress")
        if self.merge == "pull" and not self.delayed:
            refuse("delay", self.delay, f"period, {self.period}, with merge pull")
        # Decided: both keys mean one moment (6: "ours is one field"), so only one of them may be there.
        if self.switch_step and self.warmup_steps:
            refuse("warmup_steps", self.warmup_steps, "0 beside switch_step")
        if self.fragments is None:
            return
        if not isinstance(self.fragments, (list, tuple)) or not self.fragments:
            refuse("fragments", self.fragments, "lists of tensor indices")
        for fragment in self.fragments:
            if not isinstance(fragment, (list, tuple)) or not fragment or not all(is_count(i, 0) for i in fragment):
                refuse("fragments", fragment, "a list of tensor indices")
        if self.period % len(self.fragments):
            refuse("fragments", f"{len(self.fragments)} lists", f"a number of them that divides period, {self.period}")

    def check_combinations(self):
        if self.freshness > 0:
            beside = [("form", self.form == "delta"), ("delay", self.delayed), ("merge", self.merge == "reset"),
                      ("payload", self.payload == "delta"), ("lr_normalised", not self.lr_normalised)]
            for key, ok in beside:
                if not ok:
                    refuse("freshness", self.freshness, f"0 with {key} {getattr(self, key)}")
        if self.granularity == "element":
            if self.penalty in ("gap_ema", "gap_inner"):
                refuse("granularity", "element", f"global, tensor with penalty {self.penalty}")
            # Decided: rank 0's gap of every element would have to travel, so element excludes consensus.
            if self.penalty == "gap_rel" and self.consensus:
                refuse("granularity", "element", "global, tensor with consensus_scalars")

    def check_codec(self, world):
        codec = self.codec
        if not isinstance(codec, dict) or codec.get("type") not in CODECS:
            refuse("codec.type", codec.get("type") if isinstance(codec, dict) else codec, ", ".join(CODECS))
        if self.payload == "params":
            refuse("codec", codec["type"], "none with payload params")
        known = CODECS[codec["type"]]
        for key in codec:
            if key != "type" and key not in known:
                refuse(f"codec.{key}", codec[key], f"none for {codec['type']}")
        if codec["type"] == "topk":
            self.check_topk(world)
        elif "block" in codec and (codec["block"] not in (32, 64, 128, 256, 512) or self.chunk_align % codec["block"]):
            refuse("codec.block", codec["block"], "32, 64, 128, 256, 512, a divisor of chunk_align")

    def check_topk(self, world):
        codec = self.codec
        for key, words in TOPK_WORDS.items():
            if codec[key] not in words:
                refuse(f"codec.{key}", codec[key], ", ".join(words))
        block, k, k_server = codec["block"], codec["k"], codec["k_server"]
        if not is_count(block, 8) or block > 65536 or block & (block - 1):
            refuse("codec.block", block, "a power of two, 8 to 65536")
        if not is_count(k, 1) or k > block:
            refuse("codec.k", k, f"1 to block, {block}")
        if codec["bits"] not in (2, 4, 8, 32):
            refuse("codec.bits", codec["bits"], "2, 4, 8, 32")
        if not is_count(k_server, 0) or k_server > block or 0 < k_server < min(2 * k, block):
            refuse("codec.k_server", k_server, f"0, or {min(2 * k, block)} to block, {block}")
        if not is_number(codec["error_decay"]) or not 0 <= codec["error_decay"] <= 1:
            refuse("codec.error_decay", codec["error_decay"], "[0, 1]")
        if codec["median_clip"] and codec["exchange"] == "two_phase":
            refuse("codec.median_clip", True, "false with exchange two_phase")
        if self.merge in ("add_progress", "pull"):
            refuse("codec", "topk", f"another codec with merge {self.merge}")

    def warnings(self):
        """(name, bound or None) of settings that are allowed and questionable (14; sparse-loco.md, 7)."""
        out = []
        momentum = 0.0 if self.rule == "none" else self.beta
        delayed = self.form == "delta" and self.snapshot_before_update and self.freshness < 1
        if delayed and self.alpha / (1.0 - momentum) > 1 and not self.auto_floor:
            out.append(("GAIN_TOO_HIGH", 1.0 - momentum))
        if self.codec is not None and self.codec["type"] == "topk" and self.rule != "none":
            out.append(("MOMENTUM_AND_ERROR_FEEDBACK", None))
        return out


def beta_by_size(world):
    """4.5: 0 up to 16 workers, 0.2 up to 32, 0.5 up to 64, 0.6 above."""
    return next((beta for size, beta in ((16, 0.0), (32, 0.2), (64, 0.5)) if world <= size), 0.6)


def preset(name, world=1, **overrides):
    """Settings of a preset for `world` ranks, with `overrides`.

    Decided: where the table has the same number for period and delay, the delay follows a period that is given.
    Decided: a codec that is given replaces the preset's as a whole.
    """
    if name not in PRESETS:
        refuse("preset", name, ", ".join(PRESETS))
    values = dict(PRESETS[name])
    if name == "co2_paper":
        values["beta"] = beta_by_size(world)
    if name == "eager_diloco":
        values["freshness"] = 1.0 / world
    for key in REQUIRED.get(name, ()):
        if key not in overrides:
            refuse(key, None, f"a value, which preset {name} does not have")
    known = {field.name for field in dataclasses.fields(Settings)}
    for key in overrides:
        if key not in known:
            refuse(key, overrides[key], "no such key")
    values.update(overrides)
    if values.get("delay") == "period":
        values["delay"] = values["period"]
    return Settings(**values).validate(world)
