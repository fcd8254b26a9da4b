"""The copies of layers that members of a group compute with, and how they stay the model's.

Every member has copies of its own, with its parts of what is divided. Parts have memory of their
own: versions of weights move, and the user's model must not. They are taken from the model before a
step and put back behind it, so that between steps the model has what was trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.context import CONTEXT, ContextSharing, context_sharings, output_positions
from penstock.engine.device.crossing import moved
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.copies import ModuleCopies
from penstock.engine.run.materialising import Wholes
from penstock.engine.run.rank.program import SkipRoute
from penstock.engine.tensor.chain import LayerSharing, walk
from penstock.engine.tensor.group import ChannelGroup, ShardSpec
from penstock.engine.tensor.layouts import WHOLE, Layouts
from penstock.engine.tensor.seen_whole import SharedOutput
from penstock.engine.tensor.sharing import cut_tensors, shared, terms
from penstock.engine.tensor.splits import check_used, inner_splits, own_split
from penstock.engine.tensor.unequal_groups import WholePlaceholders
from penstock.engine.tensor.vocabulary import DividedOutput
from penstock.engine.transport.base import SKIP_TAGS
from penstock.planning.plans import Plan


class _TensorShard(NamedTuple):
    """A member's part of a parameter or buffer of the model."""

    original: Tensor
    cut: ShardSpec
    own: Tensor


class Sharings:
    """How the members of all groups share the layers of a model.

    Args:
        layers: of the whole model.
        plan: says how they are split.

    Attributes:
        cuts: how tensors of the model are divided, by their ids; of others, members have all.
        terms: ids of parameters that members repeat, each with a term of the gradient.
        cut_keys: as ``cuts``, by the keys of the model's state.
        shapes: of these tensors, whole, by the same keys.
        num_blocks: by stage, the most blocks of which a tensor has a part each.
        borders: by stage, the layout in which its output leaves.
        skips: by their keys, the layouts of what is stashed.

    Raises:
        ModelError: a layer cannot be split so, or layers that are tied say different things.
    """

    def __init__(self, layers: tuple[NamedLayer, ...], plan: Plan) -> None:
        names = [layer.name for layer in layers]
        given: list[str] = []
        inner: list[dict[str, str]] = []
        ends = [*accumulate(len(stage.layers) for stage in plan.stages)]
        layers_of = [layers[start:end] for start, end in pairwise([0, *ends])]
        check_used(zip(layers_of, (stage.splits for stage in plan.stages), strict=True))
        for own, stage in zip(layers_of, plan.stages, strict=True):
            patterns = {key: how for key, how in stage.splits.items() if key not in names}
            inner += [inner_splits(layer, patterns) for layer in own]
            given += [own_split(layer, stage.splits) for layer in own]
        sizes = [stage.tensor_ranks for stage in plan.stages for _ in stage.layers]
        self._sizes = dict(zip(names, sizes, strict=True))
        walked: Sequence[LayerSharing]
        if CONTEXT in given:
            walked = context_sharings(layers, given, sizes)
        else:
            walked = walk(layers, given, inner, sizes)
        self._by_name = dict(zip(names, walked, strict=True))
        self.cuts: dict[int, ShardSpec] = {}
        self.terms: set[int] = set()
        self.cut_keys: dict[str, ShardSpec] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._find(layers)
        self.num_blocks = [self._most_blocks(own) for own in layers_of]
        self.borders = [walked[end - 1].leaves for end in ends]
        self.skips = {key: self.of(layer).gives for layer in layers for key in layer.stashes}

    def _find(self, layers: tuple[NamedLayer, ...]) -> None:
        """Find the tensors that are divided, and those of which members have terms; by ids."""
        kinds: dict[int, tuple[object, str]] = {}
        for layer in layers:
            sharing = self.of(layer)
            cuts = {id(tensor): cut for tensor, cut in cut_tensors(layer.module, sharing)}
            added = {id(tensor) for tensor in terms(layer.module, sharing)}
            for name, parameter in layer.module.named_parameters():
                key = id(parameter)
                kind = cuts.get(key, "terms" if key in added else "whole")
                if self._sizes[layer.name] == 1:
                    continue  # who sits alone has all of it, however others divide it
                before, where = kinds.setdefault(key, (kind, layer.key(name)))
                if before != kind:
                    raise ModelError(
                        f"{where!r} and {layer.key(name)!r} are the same parameter, but splits "
                        "let members have different parts of it; split both layers alike, or "
                        'repeat both ("whole")'
                    )
            if self._sizes[layer.name] > 1:
                self.cuts |= cuts
                self.terms |= added
            for own_key, tensor in tensors_of(layer.module):
                if id(tensor) in cuts:
                    self.cut_keys[layer.key(own_key)] = cuts[id(tensor)]
                    self.shapes[layer.key(own_key)] = tuple(tensor.shape)

    def _most_blocks(self, layers: Sequence[NamedLayer]) -> int:
        tensors = (tensor for layer in layers for _, tensor in tensors_of(layer.module))
        return max(
            (self.cuts[id(tensor)].blocks for tensor in tensors if id(tensor) in self.cuts),
            default=1,
        )

    def along(self, skips: Iterable[SkipRoute]) -> dict[int, Layouts]:
        """By the tags of channels between stages, along which dimension members of a group have
        parts of what travels there.

        Args:
            skips: those that cross from one stage to another.
        """
        along: dict[int, Layouts] = {}
        for stage, border in enumerate(self.borders):
            along[2 * stage] = border
            along[2 * (stage + 1) + 1] = border  # gradients leave from the stage behind
        for route in skips:
            tag = SKIP_TAGS + 2 * route.number
            along[tag] = along[tag + 1] = self.skips[route.key]
        return along

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The state of a stage, of what its members have of it. What is put together is in main
        memory, since no accelerator may have room for it.

        Args:
            parts: by coordinate.
        """
        return {
            key: self.cut_keys[key].joined([part[key].cpu() for part in parts])
            if key in self.cut_keys
            else value
            for key, value in parts[0].items()
        }

    def stand_ins(
        self,
        originals: Sequence[nn.Parameter],
        parameters: Sequence[nn.Parameter],
        group: ChannelGroup | None,
    ) -> WholePlaceholders:
        """Placeholders that a member shows to groups of other sizes with the same weights.

        Args:
            originals: the model's.
            parameters: the member's, in the same order.
        """
        pairs = zip(originals, parameters, strict=True)
        return WholePlaceholders(
            parameters,
            [tuple(original.shape) for original in originals],
            [self.cuts.get(id(original)) for original in originals],
            frozenset(id(own) for original, own in pairs if id(original) in self.terms),
            group,
        )

    def of(self, layer: NamedLayer) -> LayerSharing:
        """How a layer is shared."""
        return self._by_name[layer.name]

    def shared_output(
        self, stage: int, last: nn.Module, group: ChannelGroup | None
    ) -> SharedOutput | None:
        """The output of the last stage, if each member has a part of it; ``None`` of others.

        Args:
            last: the member's last layer of the stage.
            group: that of the member.
        """
        if group is None or stage < len(self.borders) - 1:
            return None
        if self.borders[-1] is WHOLE:
            return output_positions(last, group)
        return DividedOutput(self.borders[-1], group)


def divided(
    sharings: Sharings | None,
    pairs: Iterable[tuple[nn.Parameter, nn.Parameter]],
    whole: Collection[int] = (),
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Of a rank's parameters, those of whose gradients it has a term, and those of which it has a
    part; none where nothing is shared.

    Args:
        pairs: the model's, and the rank's.
        whole: ids of the model's whose gradients are made whole elsewhere.
    """
    if sharings is None:
        return [], []
    known = [(id(theirs), ours) for theirs, ours in pairs]
    added = [ours for key, ours in known if key in sharings.terms and key not in whole]
    return added, [ours for key, ours in known if key in sharings.cuts]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by their names, each as often as it has one."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class MemberCopies(ModuleCopies):
    """The copies of one member.

    Args:
        repeated: parameters of the model that another member, or rank, has the own ones of.
        sharings: how layers are shared.
        group: with whom.
        device: of the rank.
        owned: parameters of the model into which its parts are put back.
        has_buffers: whether the model's own buffers are this member's: somebody's forwards must
            move them.
        wholes: brings whole values and takes them away again; by default the model keeps them.
    """

    def __init__(
        self,
        repeated: Iterable[nn.Parameter],
        sharings: Sharings,
        group: ChannelGroup,
        device: torch.device,
        owned: Iterable[nn.Parameter],
        has_buffers: bool,
        wholes: Wholes | None = None,
    ) -> None:
        whole = (parameter for parameter in repeated if id(parameter) not in sharings.cuts)
        super().__init__(whole, device)
        self._sharings = sharings
        self._group = group
        self._owned = {id(parameter) for parameter in owned}
        self._has_buffers = has_buffers
        self._wholes = wholes
        self._parts: dict[int, _TensorShard] = {}
        self._own_buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, layer: NamedLayer) -> nn.Module:
        sharing = self._sharings.of(layer)
        if self._wholes is not None:
            self._wholes.come(layer)
        for tensor, cut in cut_tensors(layer.module, sharing):
            if id(tensor) not in self._parts:
                self._parts[id(tensor)] = _TensorShard(tensor, cut, self._new_part(tensor, cut))
        copied = super().of(layer)
        if isinstance(sharing, ContextSharing):
            own = sharing.given_to(copied, self._group)
        else:
            own = shared(copied, sharing, self._group, layer.module)
        if self._wholes is not None:
            self._wholes.go(layer)
        return own

    @property
    def divided(self) -> frozenset[int]:
        return frozenset(self._parts)

    def _new_part(self, tensor: Tensor, cut: ShardSpec) -> Tensor:
        part = moved(cut.part(tensor.detach(), self._group.size, self._group.index), self._device)
        if not isinstance(tensor, nn.Parameter):
            return part
        own = nn.Parameter(part, tensor.requires_grad)
        vars(own).update(vars(tensor))  # what optimizers may be told by it
        return own

    def _memo(self, originals: Iterable[nn.Module]) -> dict[int, Any]:
        parts = {key: part.own for key, part in self._parts.items()}
        return {**super()._memo(originals), **parts}

    def _share(self, pairs: Iterable[Any]) -> None:
        super()._share(pairs)
        for pair in pairs:
            theirs: Mapping[str, Tensor | None] = pair.original._buffers
            if theirs and not self._has_the_models(theirs.values()):
                vars(pair.copied)["_buffers"] = {
                    name: None if buffer is None else self._buffer(buffer)
                    for name, buffer in theirs.items()
                }

    def _is_elsewhere(self, buffer: Tensor | None) -> bool:
        """Whether the model's buffer is to be copied; a member's own is on its device already."""
        own = not self._has_buffers or id(buffer) in self._parts
        return not own and super()._is_elsewhere(buffer)

    def _has_the_models(self, buffers: Iterable[Tensor | None]) -> bool:
        return self._has_buffers and not any(id(buffer) in self._parts for buffer in buffers)

    def _buffer(self, buffer: Tensor) -> Tensor:
        part = self._parts.get(id(buffer))
        if part is not None:
            return part.own
        if self._has_buffers:
            return buffer
        original, own = self._own_buffers.get(id(buffer), (None, None))
        if own is None or original is not buffer:
            own = torch.empty_like(buffer, device=self._device).copy_(buffer.detach())
            self._own_buffers[id(buffer)] = buffer, own
        return own

    def follow(self) -> None:
        super().follow()
        with torch.no_grad():
            for original, cut, own in self._parts.values():
                if not original.is_meta:
                    own.copy_(cut.part(original.detach(), self._group.size, self._group.index))
                own.requires_grad_(original.requires_grad)
            for buffer, own_buffer in self._own_buffers.values():
                own_buffer.copy_(buffer)

    def let_go(self) -> None:
        super().let_go()
        with torch.no_grad():
            for original, cut, own in self._parts.values():
                if original.is_meta:
                    continue
                if id(original) in self._owned or not isinstance(original, nn.Parameter):
                    cut.put(original.detach(), own.detach(), self._group.size, self._group.index)
