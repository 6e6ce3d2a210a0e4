"""Builds the program of a model's forward, op by op.

A family writes its forward with a `Builder`. Each call adds one op, and returns the value that the op makes. Weights come from a
`TensorSource` by the names of their modules, so a family does not know where they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np

from outrider.kernels import cpu as native
from outrider.kernels.cpu.library import (
    Activation,
    Finish,
    Map,
    Norm,
    Recurrence,
    Router,
)
from outrider.kernels.cpu.packed import LANES, MOST, rounded
from outrider.models.base import FINAL_NORM
from outrider.models.native.program import AngleTable, NotNative, Op, Program, Value
from outrider.models.native.weights import StoredSource, TensorSource
from outrider.models.rotary import power

# By the names that configurations and families have for them: the finish of a linear over gate and up, and so on.
_GATES = {"silu": Finish.SWIGLU, "swish": Finish.SWIGLU, "gelu_pytorch_tanh": Finish.GEGLU}
_ACTIVATIONS = {
    "identity": Activation.IDENTITY,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
    "sigmoid": Activation.SIGMOID,
}
_MAPS = {"linear": Map.LINEAR_MAP, "softplus": Map.SOFTPLUS, "exp": Map.EXP, "sigmoid": Map.SIGMOID_MAP}
# Of experts. Those with relu2 have no gate.
_EXPERT_GATES = {name: _ACTIVATIONS[name] for name in ("silu", "swish", "gelu_pytorch_tanh", "relu2")}
_EXPERT_GATES["scaled_swish"] = Activation.SWISH
_WHEN = {"always": (), "features": ("fresh",), "fed": ("fed",)}
# Rotary types whose frequencies do not depend on the length of the text.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn", "proportional")
_TABLES = ("float32", "bfloat16", "float16")


@dataclass
class Builder:
    """Adds ops to a program.

    In its methods x, a and b are values, and name and names are those of modules. Widths are checked: what does not fit raises
    ValueError with both sizes. An op adds to `add_to`, or writes `out`, in place of making a value.

    Args:
        source: gives the weights.
        layer: the one that is being built; -1 outside of layers.
    """

    source: TensorSource | StoredSource
    layer: int = -1
    _ops: list[Op] = field(default_factory=list)
    _widths: list[int] = field(default_factory=list)
    _angles: list[AngleTable] = field(default_factory=list)
    _cells: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    _layers: int = 0
    _states: int = 0
    _hidden: int = 0

    def layers(self, x: Value, count: int, name: str = "model.layers") -> Iterator[str]:
        """The names of the layers in turn. After each, x is what a tap of that layer shows."""
        if type(count) is not int or count < 1:
            raise ValueError(f"it has {count!r} layers")
        self._layers, self._hidden = count, x.width
        for self.layer in range(count):
            yield f"{name}.{self.layer}"
            self._add("rows", flags=("tap",), in_=x, i=(self.layer,))
        self.layer = -1

    def value(self, width: int) -> Value:
        """A new register."""
        if not (type(width) is int and 0 < width <= MOST):
            raise ValueError(f"a value has {width!r} numbers, and it must be a whole number from 1 to {MOST}")
        self._widths.append(width)
        return Value(len(self._widths) - 1, 0, width)

    def embed(self, name: str = "model.embed_tokens", factor: float = 1.0, out: Value | None = None) -> Value:
        """The row of a node's token, times a factor."""
        table = self.source.table(name)
        floats = isinstance(table, np.ndarray)
        rows, width = table.shape if floats else (table.n, table.k)
        if rows < self.source.vocab_size:
            raise ValueError(f"{name} has {rows} rows for {self.source.vocab_size} tokens")
        if floats and not (table.flags.c_contiguous and table.dtype.name in _TABLES):
            raise ValueError(f"{name} is {table.dtype}, and a table is one of {', '.join(_TABLES)}")
        place = self._place(out, None, width)
        if floats:
            return self._add("embed", out=place, p=table, i=(native.FORMATS[table.dtype.name],), f=(factor,))
        return self._add("embed", out=place, matrices=(table,), f=(factor,))

    def given(self, width: int, *, when: str = "always", out: Value | None = None) -> Value:
        """What the caller gives to each node. when: "features" or "fed": only if this is given."""
        return self._add("given", flags=_WHEN[when], out=self._place(out, None, width))

    def norm(
        self,
        x: Value,
        name: str | None,
        *,
        eps: float,
        kind: str = "rms",
        group: int = 0,
        per_group: bool = False,
        one_added: bool = False,
        add_to: Value | None = None,
        out: Value | None = None,
        when: str = "always",
    ) -> Value:
        """norm(x) * weight + bias, if there is one.

        Args:
            name: None for no weight.
            eps: of the root.
            kind: "rms" or "layer".
            group: numbers that are normed together, such as a head; 0 for all.
            per_group: groups have weights of their own.
            one_added: it is 1 + weight.
                when: see `given`.
        """
        size = x.width if per_group else group or x.width
        weight = None if name is None else self.vector(f"{name}.weight", size)
        bias = None if self.source.tensor(f"{name}.bias") is None else self.vector(f"{name}.bias", size)
        weight = weight + np.float32(1) if weight is not None and one_added else weight
        place = self._place(out, add_to, x.width)
        flags = (*_WHEN[when], *(("per_group",) if per_group else ()), *(("add",) if add_to else ()))
        numbers = (Norm[f"{kind.upper()}_NORM"], group)
        return self._add("norm", flags=flags, in_=x, out=place, p=weight, q=bias, i=numbers, f=(eps,))

    def l2_norm(self, x: Value, *, group: int, eps: float) -> None:
        """Each group of numbers of x over the root of its sum of squares and eps, in place."""
        weight = np.full(group, group**-0.5, np.float32)  # a root mean square has the number of them in it
        self._add("norm", in_=x, out=x, p=weight, i=(Norm.RMS_NORM, group), f=(eps / group,))

    def linear(
        self,
        x: Value,
        *names: str,
        width: int = 0,
        gate: str | None = None,
        factor: float = 1.0,
        add_to: Value | None = None,
        out: Value | None = None,
        when: str = "always",
    ) -> Value:
        """The linears of these names side by side. width: of the result; 0: as the weights have it. gate: of gate and up, "silu"
        or "gelu_pytorch_tanh"; one name is then of a linear that has both."""
        if gate is not None and gate not in _GATES:
            raise NotNative(f"its activation is {gate}")
        matrix = self.source.matrix(*names, paired=gate is not None)
        width = width or matrix.n
        self._check_matrix(names[0], matrix, 2 * rounded(width) if gate else width, x.width)
        finish = _GATES[gate] if gate else Finish.STORE if add_to is None else Finish.ADD
        place = self._place(out, add_to, width)
        return self._add("linear", flags=_WHEN[when], in_=x, out=place, matrices=(matrix,), i=(finish,), f=(factor,))

    def heads(self, x: Value, matrix: native.Packed, heads: int, *, step: int, out: Value, out_step: int) -> None:
        """A linear for each head on its own. matrix: the outputs of one head after another. step, out_step: numbers from a head
        to the next, in x and out. A head begins with what the linear takes and gives."""
        size = matrix.n // max(heads, 1)
        if heads < 1 or size * heads != matrix.n or size % LANES or len(matrix.formats) != 1:
            raise NotNative(
                f"{matrix.n} outputs of {heads} heads are not {LANES} numbers, or a multiple of it, of each"
            )
        if min(step - matrix.k, x.width - heads * step, out_step - size, out.width - heads * out_step) < 0:
            raise ValueError(f"{heads} heads of {matrix.k} and {size} numbers do not fit {x.width} and {out.width}")
        self._add("heads", in_=x, out=out, matrices=(matrix,), i=(heads, step, out_step))

    def has(self, name: str) -> bool:
        """Whether there is a module with a weight of this name."""
        return self.source.tensor(f"{name}.weight") is not None

    def rotary(self, settings: Mapping[str, Any] | None, layer_type: str = "", module: str = "model.rotary_emb") -> int:
        """The number of a table of angles, for `rope`. settings: `rope_parameters` of the configuration. layer_type: of models
        that have frequencies for each type of layers. module: the name of what has them."""
        kind = (settings or {}).get("rope_type", "default")
        if kind not in (*_FIXED_ROTARY, "longrope"):
            raise NotNative(f"its rotary embedding ({kind}) changes with the length of the text")
        name = f"{module}.{layer_type}_" if layer_type else f"{module}."
        frequencies = self.source.tensor(f"{name}inv_freq")
        if frequencies is None or frequencies.ndim != 1:
            raise NotNative(f"it has no frequencies {name}inv_freq")
        factor = float(self.source.number(f"{name}attention_scaling", 1.0))
        number = self.angles(frequencies, factor)
        if kind == "longrope":
            self._angles[number] = self._with_long(self._angles[number], settings or {})
        return number

    def _with_long(self, short: AngleTable, settings: Mapping[str, Any]) -> AngleTable:
        """LongRoPE: the longest text that a cache may hold chooses the frequencies, as in vLLM and `HFModel`. If a text chose,
        its earlier keys would have other frequencies, and a node would depend on how its prompt was cut."""
        factors = np.array(settings["long_factor"], np.float32)
        if factors.shape != short.inv_freq.shape:
            raise ValueError("LongRoPE has two lists of factors of one length")
        exponents = np.arange(0, 2 * len(factors), 2, dtype=np.float32) / (2 * len(factors))
        long = 1.0 / (factors * power(float(settings["rope_theta"]), exponents))
        return replace(short, long=long, first=int(settings["original_max_position_embeddings"]))

    def grown(self, table: int, beta: float, every: int, length: int) -> int:
        """The number of a table like another one, with a factor of 1 + beta * ln(1 + position // every) up to a length."""
        logarithms = [float(Decimal(1 + n).ln()) for n in range(-(-length // every))]
        factors = self._angles[table].factors * (1 + beta * np.array(logarithms, np.float32))
        self._angles.append(replace(self._angles[table], factors=factors, every=every))
        return len(self._angles) - 1

    def angles(self, frequencies: np.ndarray, factor: float) -> int:
        """The number of a table of angles. frequencies: float32 [n]. factor: of cosines and sines."""
        if frequencies.dtype != np.float32 or not math.isfinite(factor):
            raise ValueError(f"rotary frequencies are {frequencies.dtype} times {factor}, and they must be float32")
        self._angles.append(AngleTable(np.ascontiguousarray(frequencies), np.array([factor], np.float32)))
        return len(self._angles) - 1

    def rope(self, x: Value, table: int, dim: int, *, offset: int = 0, interleaved: bool = False) -> None:
        """Rotate the heads of x in place. dim: of a head. offset: where the rotated numbers of a head begin. interleaved: the two
        numbers of a pair are neighbours."""
        rotary = 2 * len(self._angles[table].inv_freq)
        if not 0 < rotary <= dim - offset or x.width % dim:
            raise ValueError(f"there are {rotary // 2} rotary frequencies for heads of {dim} numbers")
        flags = ("interleaved",) if interleaved else ()
        self._add("rope", flags=flags, in_=x, i=(table, dim, offset, rotary))

    def store(self, key: Value, value: Value | None, heads: int) -> int:
        """Keys and values into the cache. Returns the number of the cache's layer, for `attend`. value: None if the first numbers
        of a key are its value."""
        width = 0 if value is None else value.width
        if heads < 1 or key.width % heads or width % heads:
            raise ValueError(f"{heads} heads do not divide keys of {key.width} and values of {width} numbers")
        cache = max(self.layer, 0)
        self._cells[cache] = heads, key.width // heads, width // heads
        self._add("store", in_=key, other=value, i=(cache, *self._cells[cache]))
        return cache

    def attend(
        self,
        query: Value,
        cache: int,
        *,
        heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: str | None = None,
        value_dim: int = 0,
    ) -> Value:
        """Attention over the keys and values of a layer of the cache.

        Args:
            cache: the number that `store` gave.
            heads: of queries.
            scale: of the scores.
            window: tokens that a node sees; 0: all.
            softcap: of the scores; 0: none.
            sinks: the name of the parameter [heads].
            value_dim: numbers of a key that are its value, if the cache has no values.
        """
        kv_heads, dim, width = self._cells[cache]
        if not 0 < (width or value_dim) <= max(width, dim):
            raise ValueError(f"a value is {value_dim} of the {dim} numbers of a key")
        flags, value_dim = () if width else ("same",), width or value_dim
        if heads % kv_heads:
            raise ValueError(f"{kv_heads} heads of keys do not divide {heads} heads")
        if query.width != heads * dim or window < 0:
            raise ValueError(f"queries are {query.width} numbers for {heads} heads of {dim}, and the window {window}")
        numbers = (cache, heads, kv_heads, dim, value_dim, window)
        p = None if sinks is None else self.vector(sinks, heads)
        return self._add(
            "attend", flags=flags, in_=query, out=self.value(heads * value_dim), p=p, i=numbers, f=(scale, softcap)
        )

    def route(
        self,
        logits: Value,
        *,
        k: int,
        kind: str,
        normalised: bool = False,
        scaling: float = 1.0,
        added: float = 0.0,
        correction: str | None = None,
        factors: str | None = None,
        groups: int = 0,
        kept_groups: int = 0,
    ) -> Value:
        """The k experts of each node, and their weights.

        Args:
            k: experts of a node.
            kind: "softmax_top", "top_softmax" or "sigmoid_top".
            normalised: the weights are divided by their sum and `added`.
            scaling: of the weights.
            added: to their sum.
            correction: the name of a parameter that is added to choose, and not to the weights.
            factors: the name of a parameter with factors of the weights of each expert.
            groups: only experts of the best `kept_groups` are chosen; 0: there are none.
            kept_groups: how many are the best.
        """
        if not 0 < k <= logits.width or (groups and (logits.width % groups or not 0 < kept_groups <= groups)):
            raise ValueError(f"{k} of {logits.width} experts cannot be chosen from {kept_groups} of {groups} groups")
        p, q = (None if name is None else self.vector(name, logits.width) for name in (correction, factors))
        numbers = (Router[kind.upper()], k, groups, kept_groups)
        flags = ("normalised",) if normalised else ()
        return self._add(
            "route", flags=flags, in_=logits, out=self.value(2 * k), p=p, q=q, i=numbers, f=(scaling, added)
        )

    def experts(
        self,
        x: Value,
        routed: Value,
        name: str,
        *,
        count: int,
        width: int,
        activation: str,
        add_to: Value | None = None,
        factor: float = 1.0,
        limit: float = 0.0,
        alpha: float = 0.0,
        plus: float = 0.0,
    ) -> Value:
        """add_to += factor * the sum of weight * down(activation(gate(x)) * (up(x) + plus)) over a node's experts, or of weight *
        down(activation(up(x))) if they have no gate. It gives a value of its own without add_to.

        Args:
            routed: of `route`.
            name: of the module with the experts.
            count: of experts; 1: the module is an MLP.
            width: between gate and down.
            activation: a name of `_EXPERT_GATES`.
            factor: of the sum.
            limit: gate is at most this, and up is in +-limit; 0: none.
            alpha: of "scaled_swish", gate * sigmoid(alpha * gate).
            plus: is added to up.
        """
        if activation not in _EXPERT_GATES or (limit > 0 and activation not in ("silu", "swish", "scaled_swish")):
            raise NotNative(f"its experts have the activation {activation}")
        matrices = self.source.experts(name) if count > 1 else self._one_expert(name)
        if len(matrices) != 2 * count:
            raise ValueError(f"{name} has {len(matrices) // 2} experts, and the settings say {count}")
        place, flags = self._place(None, add_to, (add_to or x).width), ("add",) if add_to else ()
        first = width if activation == "relu2" else 2 * rounded(width)
        for gate_up, down in zip(matrices[::2], matrices[1::2], strict=True):
            self._check_matrix(f"{name}.gate_up", gate_up, first, x.width)
            self._check_matrix(f"{name}.down", down, place.width, width)
        numbers = (routed.width // 2, _EXPERT_GATES[activation], width)
        floats = (limit, alpha, plus, factor)
        return self._add(
            "experts", flags=flags, in_=x, other=routed, out=place, matrices=tuple(matrices), i=numbers, f=floats
        )

    def _one_expert(self, name: str) -> Sequence[native.Packed]:
        gate_up = self.source.matrix(f"{name}.gate_proj", f"{name}.up_proj", paired=True)
        return gate_up, self.source.matrix(f"{name}.down_proj")

    def gate(self, a: Value, b: Value | None, function: str, *, out: Value | None = None) -> Value:
        """function(a) * b."""
        if function not in _ACTIVATIONS:
            raise NotNative(f"its activation is {function}")
        if b is not None and a.width != b.width:
            raise ValueError(f"a gate of {a.width} numbers does not fit {b.width}")
        return self._add("gate", in_=a, other=b, out=self._place(out, None, a.width), i=(_ACTIVATIONS[function],))

    def map(
        self,
        x: Value,
        function: str,
        *,
        scale: np.ndarray | None = None,
        shift: np.ndarray | None = None,
        factor: float = 1.0,
        out: Value | None = None,
    ) -> Value:
        """function(x * scale + shift) * factor. function: "linear", "softplus", "exp" or "sigmoid"."""
        for t in (scale, shift):
            if t is not None and (t.shape != (x.width,) or t.dtype != np.float32 or not t.flags.c_contiguous):
                raise ValueError(f"a scale or shift is {t.dtype} {list(t.shape)} for {x.width} numbers")
        numbers = (_MAPS[function], 1, 0, 0)
        return self._add("map", in_=x, out=self._place(out, None, x.width), p=scale, q=shift, i=numbers, f=(factor,))

    def move(self, x: Value, heads: int, *, step: int, out: Value, out_step: int) -> None:
        """Copy x and what lies `step` numbers further, for each head, to `out` and what lies `out_step` numbers further."""
        last = x.offset + (heads - 1) * step + x.width, out.offset + (heads - 1) * out_step + x.width
        if (
            heads < 1
            or last[0] > self._widths[x.register]
            or last[1] > self._widths[out.register]
            or x.width != out.width
        ):
            raise ValueError(f"{heads} heads of {x.width} numbers end at {last[0]} and {last[1]}, which is not there")
        self._add("map", in_=x, out=out, i=(_MAPS["linear"], heads, step, out_step), f=(1.0,))

    def conv(self, x: Value, name: str, *, activation: str | None = None) -> Value:
        """The causal convolution over the node's path, with its bias if there is one. activation: None or "silu"."""
        weight = self.source.tensor(f"{name}.weight")
        if weight is None or weight.ndim != 3 or weight.shape[:2] != (x.width, 1) or not 1 < weight.shape[2] <= 8:
            raise ValueError(f"{name} has no weights [{x.width}, 1, taps] of 2 to 8 taps")
        if activation not in (None, "silu", "swish"):
            raise NotNative(f"its convolution has the activation {activation}")
        bias = self.vector(f"{name}.bias", x.width) if self.source.tensor(f"{name}.bias") is not None else None
        numbers = (self._state(), weight.shape[2], _ACTIVATIONS["silu" if activation else "identity"])
        taps = np.ascontiguousarray(weight[:, 0].T)
        return self._add("conv", in_=x, out=self.value(x.width), p=taps, q=bias, i=numbers)

    def delta_rule(
        self, x: Value, more: Value, *, heads: int, keys: int, width: int, groups: int, factor: float = 1.0
    ) -> Value:
        """The gated delta rule. x: queries and keys of the groups, then the values of the heads. more: beta, then the decay, of
        each head. factor: of the result."""
        if not (groups > 0 and heads % groups == 0 and x.width == 2 * groups * keys + heads * width):
            raise ValueError(
                f"{x.width} numbers are not {groups} queries and keys of {keys} and {heads} values of {width}"
            )
        if more.width != 2 * heads:
            raise ValueError(f"{more.width} numbers are not beta and decay of {heads} heads")
        numbers = (self._state(), Recurrence.DELTA_RULE, heads, keys, width, groups, 0)
        return self._add("scan", in_=x, other=more, out=self.value(heads * width), i=numbers, f=(factor,))

    def selective(
        self,
        x: Value,
        step: Value,
        *,
        a: np.ndarray,
        through: np.ndarray,
        heads: int,
        channels: int,
        width: int,
        groups: int,
    ) -> Value:
        """The selective state space of Mamba 2.

        Args:
            x: the channels of the heads, then B and C of the groups.
            step: of each head.
            a: float32 [heads], the decay.
            through: float32 [heads], how much of a channel goes to the result as it is.
            heads: of the mixer.
            channels: of a head.
            width: of a channel's state.
            groups: that share B and C.
        """
        if not (groups > 0 and heads % groups == 0 and x.width == heads * channels + 2 * groups * width):
            raise ValueError(f"{x.width} numbers are not {heads} heads of {channels} and {groups} groups of {width}")
        if not step.width == len(a) == len(through) == heads:
            raise ValueError(f"{heads} heads have {step.width} steps, {len(a)} decays and {len(through)} factors")
        numbers = (self._state(), Recurrence.SELECTIVE, heads, channels, width, groups, 0)
        return self._add(
            "scan", in_=x, other=step, out=self.value(heads * channels), p=a, q=through, i=numbers, f=(1.0,)
        )

    def _state(self) -> int:
        self._states += 1
        return self._states - 1

    def rows(self) -> None:
        """From here on in the last layer only the nodes whose logits are wanted. Call it where no node needs another's values."""
        self._add("rows")

    def head(
        self,
        x: Value,
        name: str = "lm_head",
        *,
        factor: float = 1.0,
        softcap: float = 0.0,
        fed_back: Value | None = None,
    ) -> None:
        """The logits. x: after the final norm, which is what the tap FINAL_NORM shows. softcap: of the logits; 0: none. fed_back:
        what a node feeds back."""
        matrix, ids = self.source.matrix(name), self.source.head_ids
        self._check_matrix(name, matrix, self.source.vocab_size if ids is None else len(ids), x.width)
        self._add("rows", flags=("tap",), in_=x, i=(FINAL_NORM,))
        self.rows()
        self._add("head", in_=x, other=fed_back, matrices=(matrix,), f=(factor, softcap))

    def program(self) -> Program:
        """What was built. Raises ValueError unless it has an embedding and a head."""
        embed, head = self._ops[0], self._ops[-1]
        if embed.kind != "embed" or head.kind != "head":
            raise ValueError("a program begins with an embedding and ends with a head")
        return Program(
            tuple(self._ops),
            tuple(self._widths),
            tuple(self._angles),
            dict(self._cells),
            head.matrices[0],
            self.source.head_ids,
            embed.matrices[0] if embed.matrices else embed.p,  # pyright: ignore[reportArgumentType]
            embed.f[0],
            self.source.vocab_size,
            self._layers,
            self._hidden,
            head.other.width if head.other else 0,
        )

    def _add(self, kind: str, **settings: Any) -> Value:
        op = Op(kind, self.layer, **settings)
        self._ops.append(op)
        return op.out or Value(0, 0, 0)

    def _place(self, out: Value | None, add_to: Value | None, width: int) -> Value:
        place = out or add_to or self.value(width)
        if place.width != width:
            raise ValueError(f"{width} numbers do not fit a value of {place.width}")
        return place

    def vector(self, name: str, size: int = 0) -> np.ndarray:
        """A parameter of one dimension. size: its numbers; 0: as the weights have it. Raises ValueError if it is not there."""
        numbers = self.source.tensor(name)
        if numbers is None:
            raise ValueError(f"{name} is not there")
        if numbers.size != (size or numbers.size) or numbers.dtype != np.float32:
            raise ValueError(f"{name} is {numbers.dtype} {[*numbers.shape]}, and the settings say float32 [{size}]")
        return numbers.reshape(-1)

    def decay(self, name: str, size: int) -> np.ndarray:
        """-exp of a parameter of one dimension."""
        return -np.exp(self.vector(name, size).astype(np.float64)).astype(np.float32)

    def _check_matrix(self, name: str, given: native.Packed, n: int, k: int) -> None:
        if (given.n, given.k) != (n, k):
            raise ValueError(f"{name} is {given.n} x {given.k}, and the settings say {n} x {k}")


Build = Callable[[Builder, Any], None]
"""How a family builds its program: (builder, configuration). It ends with `Builder.head`."""
