"""``Trial``: the results of a training run, and the report about it."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.base.units import format_share
from penstock.core.timing import find_parting, idle_of
from penstock.core.timing.timeline import Timeline
from penstock.drawing import Fact, Report, Series, StageRow, TimelineRecord
from penstock.drawing.report import doubt_of, reason
from penstock.planning.plans import Plan
from penstock.trial.workload import Contestant, Workload


@dataclass(frozen=True)
class Trial:
    """A finished training run.

    Attributes:
        workload: what was trained.
        plan: how it was spread.
        pipeline: the pipeline and its results.
        twins: single devices and their results on the same steps; the first has one thread and the
            pipeline's microbatches. Empty if there was no comparison.
    """

    workload: Workload
    plan: Plan
    pipeline: Contestant
    twins: tuple[Contestant, ...] = ()

    @cached_property
    def predicted(self) -> Timeline:
        """The simulated timeline of one step, or of a stream as long as the measured one."""
        return self.plan.simulate(self._num_streamed)

    @property
    def _num_streamed(self) -> int:
        """Minibatches of the measured timeline."""
        num_microbatches = self.measured.schedule.num_microbatches
        return max(1, round(num_microbatches / self.plan.num_microbatches))

    @property
    def predicted_seconds(self) -> float:
        """The predicted seconds of a step; in a stream, its share of the whole."""
        streamed = self._num_streamed if self.plan.versions.asynchronous else 1
        return self.predicted.makespan / streamed

    @cached_property
    def measured(self) -> Timeline:
        """The recorded step that took the median time."""
        middle = sorted(self.pipeline.timelines, key=lambda timeline: timeline.makespan)
        return middle[len(middle) // 2]

    @property
    def _stages(self) -> range:
        return range(len(self.plan.stages))

    @property
    def step_seconds(self) -> float:
        """Median time of a step of the pipeline that nobody disturbed."""
        return self.pipeline.pace.seconds

    def speed_up(self, twin: Contestant) -> float:
        """How many times as fast as ``twin`` the pipeline is, by median step time."""
        return twin.pace.seconds / self.step_seconds

    def _doubt(self, *beside: Contestant) -> str:
        """Why times of the pipeline, and of who is compared with it, say little; empty if they say
        how fast it is."""
        others = max(contestant.pace.others for contestant in (self.pipeline, *beside))
        return doubt_of(others)

    def _timed(self, label: str, value: str, note: str, *beside: Contestant) -> Fact:
        """A number that is as good as the times that it comes from."""
        doubt = self._doubt(*beside)
        return Fact(
            label=label,
            value=value,
            note="; ".join(filter(None, (doubt, note))),
            doubtful=bool(doubt),
        )

    @property
    def largest_loss_difference(self) -> float:
        """The largest difference between the pipeline's losses and those of the first twin."""
        pairs = zip(self.pipeline.losses, self.twins[0].losses, strict=True)
        return max(abs(ours - theirs) for ours, theirs in pairs)

    @property
    def largest_parameter_difference(self) -> float:
        """The largest difference between the pipeline's parameters and buffers and those of the
        first twin, after the last step."""
        theirs = self.twins[0].model.state_dict()
        return max(
            float((value.double() - theirs[key].double()).abs().max())
            for key, value in self.pipeline.model.state_dict().items()
            if value.numel()
        )

    @property
    def units_per_second(self) -> float:
        """How many elements of the targets the pipeline trains on per second."""
        return self.workload.num_units() / self.step_seconds

    def numbers(self) -> dict[str, object]:
        """The headline numbers for programs, in seconds and ratios."""
        compared = {
            "largest_loss_difference": self.largest_loss_difference,
            "largest_parameter_difference": self.largest_parameter_difference,
            "speed_up": {twin.name: self.speed_up(twin) for twin in self.twins},
        }
        return {
            "num_steps": len(self.pipeline.losses),
            "predicted_step_seconds": self.predicted_seconds,
            "measured_step_seconds": self.step_seconds,
            "predicted_bubble": self.predicted.bubble,
            "predicted_stage_bubble": self.predicted.stage_bubble,
            "measured_bubble": self.measured.bubble,
            "measured_stage_bubble": self.measured.stage_bubble,
            "predicted_idle": [idle._asdict() for idle in idle_of(self.predicted)],
            "measured_idle": [idle._asdict() for idle in idle_of(self.measured)],
            "parting": self._parting().value,
            "units_per_second": self.units_per_second,
            "losses": self.pipeline.losses,
            "held_out": self.pipeline.held_out,
            "share_of_others": {
                contestant.name: contestant.pace.others
                for contestant in (self.pipeline, *self.twins)
            },
            **(compared if self.twins else {}),
        }

    def facts(self) -> tuple[Fact, ...]:
        """The headline numbers for people."""
        return (*self._sameness(), *self._speed(), *self._prediction(), *self._learning())

    def _sameness(self) -> Sequence[Fact]:
        if not self.twins:
            return ()
        if self.plan.versions.asynchronous:
            return (
                Fact(
                    label="age of gradients, by stage",
                    value=", ".join(f"{delay:g}" for delay in self._delays()) + " updates",
                    note="not what one device computes; `penstock verify` proves that it is what "
                    "the plan's versions say",
                ),
            )
        steps = len(self.pipeline.losses)
        note = f"pipeline against {self.twins[0].name}, {steps} steps"
        return (
            Fact(
                label="largest difference in loss",
                value=_difference(self.largest_loss_difference),
                note=note,
            ),
            Fact(
                label="largest difference in final parameters",
                value=_difference(self.largest_parameter_difference),
                note=note,
            ),
        )

    def _speed(self) -> Sequence[Fact]:
        ideal = self.plan.num_ranks * (1 - self.predicted.bubble)
        notes = {0: f"at most {ideal:.2f}× with this bubble"}
        return (
            *(
                self._timed(
                    f"speed-up over {twin.name}",
                    f"{self.speed_up(twin):.2f}×",
                    notes.get(index, "on the same two cores"),
                    twin,
                )
                for index, twin in enumerate(self.twins)
            ),
            self._timed(
                "throughput",
                f"{self.units_per_second:,.0f} {self.workload.unit}s/s",
                "pipeline, median step",
            ),
        )

    def _prediction(self) -> Sequence[Fact]:
        predicted, measured = self.predicted, self.measured
        error = self.predicted_seconds / self.step_seconds - 1
        return (
            Fact(label="step time, predicted", value=_milliseconds(self.predicted_seconds)),
            self._timed(
                "step time, measured",
                _milliseconds(self.step_seconds),
                f"median; the prediction is {abs(error):.1%} "
                f"{'longer' if error > 0 else 'shorter'}",
            ),
            Fact(
                label="bubble, predicted",
                value=format_share(predicted.bubble),
                note=f"stage bubble {format_share(predicted.stage_bubble)}",
            ),
            Fact(
                label="bubble, measured",
                value=format_share(measured.bubble),
                note=f"stage bubble {format_share(measured.stage_bubble)}",
            ),
            Fact(
                label="idle time, measured",
                value=_shares(measured),
                note="bubble, waiting for slow peers, communication, of all rank time",
            ),
            self._parting(),
        )

    def _parting(self) -> Fact:
        """Names the first op that did not run as predicted, and why."""
        parting = find_parting(self.predicted, self.measured)
        return Fact(
            label="first op unlike its prediction",
            value=f"{parting.measured.op} on rank {parting.measured.rank}" if parting else "none",
            note=reason(parting) if parting else "in the measured step",
        )

    def _learning(self) -> Sequence[Fact]:
        facts = [
            Fact(
                label="training loss",
                value=f"{self.pipeline.losses[0]:.3f} → {self.pipeline.losses[-1]:.3f}",
                note="first and last step",
            )
        ]
        if self.pipeline.held_out:
            first, last = self.pipeline.held_out[0], self.pipeline.held_out[-1]
            facts.append(
                Fact(
                    label="held-out loss",
                    value=f"{first[1]:.3f} → {last[1]:.3f}",
                    note=f"after step {first[0]} and step {last[0]}",
                )
            )
        return facts

    def headline(self) -> str:
        """The outcome of the run in one sentence."""
        devices = f"{self.plan.num_ranks} devices" if self.plan.num_ranks > 1 else "One device"
        steps = len(self.pipeline.losses)
        if not self.twins:
            error = self.predicted_seconds / self.step_seconds - 1
            doubt = self._doubt()
            return (
                f"{devices} trained {steps} steps of {_milliseconds(self.step_seconds)} each; the "
                f"prediction was {abs(error):.1%} {'longer' if error > 0 else 'shorter'}"
                f"{f', but {doubt}' if doubt else ''}."
            )
        fast = f"{devices} trained {self.speed_up(self.twins[0]):.2f} times as fast as one"
        doubt = self._doubt(self.twins[0])
        if doubt:
            fast = f"{devices} trained beside one (how fast says little: {doubt})"
        if self.plan.versions.asynchronous:
            oldest = max(self._delays())
            return f"{fast}, with gradients that are up to {oldest:g} updates old."
        difference = self.largest_parameter_difference
        if difference == 0 == self.largest_loss_difference:
            return f"{fast}, with the same losses and the same weights, to the bit."
        return f"{fast}, and after {steps} steps no weight differs by more than {difference:.2g}."

    def main_numbers(self) -> tuple[Fact, ...]:
        """How fast, whether it is the same as one device, and how idle: what most people want."""
        forced = sum(idle.bubble for idle in idle_of(self.predicted))
        all_time = self.predicted.num_ranks * self.predicted.makespan
        share = forced / all_time if all_time else 0.0
        idle = Fact(
            label="devices idle (bubble)",
            value=format_share(self.measured.bubble),
            note=f"{share:.1%} predicted, from what the schedule forces with these stages",
        )
        took = f"{_milliseconds(self.step_seconds)} a step, median"
        if not self.twins:
            return (
                self._timed("step time", _milliseconds(self.step_seconds), "median"),
                *self._speed(),
                idle,
            )
        speed_up = self.speed_up(self.twins[0])
        fast = self._timed(
            "as fast as one device",
            f"{speed_up:.2f}×",
            f"on {self.plan.num_ranks}; {took}",
            self.twins[0],
        )
        return fast, self._same(), idle

    def _same(self) -> Fact:
        steps = len(self.pipeline.losses)
        if self.plan.versions.asynchronous:
            return Fact(
                label="same as one device",
                value="no",
                note=f"gradients are up to {max(self._delays()):g} updates old, as planned",
            )
        worst = max(self.largest_loss_difference, self.largest_parameter_difference)
        return Fact(
            label="same as one device",
            value="to the bit" if worst == 0 else f"to {worst:.2g}",
            note=f"losses and weights, {steps} steps",
        )

    def _delays(self) -> list[float]:
        return [self.plan.versions.delay(self.plan.place(stage)) for stage in self._stages]

    def report(self, command: str = "") -> Report:
        """The report of the run, which ``write_report`` turns into a page.

        Args:
            command: that gives such a run again, for whoever wants one.
        """
        plan = self.plan
        return Report(
            title=f"{self.workload.name}: {plan.schedule} on {plan.num_ranks} ranks",
            subtitle=f"{platform.system()} {platform.machine()}, torch {torch.__version__} · "
            f"{datetime.datetime.now():%Y-%m-%d %H:%M} · {self.workload.notes}",
            headline=self.headline(),
            numbers=self.main_numbers(),
            facts=self.facts(),
            command=command,
            plan_json=plan.to_json(),
            plan_text=str(plan),
            stages=tuple(
                StageRow(
                    layers=stage.layers,
                    rank=stage.rank,
                    forward_seconds=stage.forward_seconds,
                    backward_seconds=stage.backward_input_seconds + stage.backward_weight_seconds,
                    parameter_bytes=stage.parameter_bytes * stage.weight_versions,
                    gradient_bytes=stage.summed_bytes,
                    optimizer_bytes=stage.optimizer_bytes,
                    activation_bytes=stage.activation_bytes,
                    peak_activations=stage.peak_activations,
                )
                for stage in plan.stages
            ),
            predicted=TimelineRecord.of(self.predicted),
            measured=TimelineRecord.of(self.measured),
            losses=self._curves(),
        )

    def _curves(self) -> tuple[Series, ...]:
        curves = {"training, pipeline": list(enumerate(self.pipeline.losses, start=1))}
        if self.twins:
            twin = self.twins[0]
            curves[f"training, {twin.name}"] = list(enumerate(twin.losses, start=1))
        if self.pipeline.held_out:
            curves["held-out, pipeline"] = self.pipeline.held_out
        return tuple(
            Series(name=name, points=tuple((step, _finite(loss)) for step, loss in points))
            for name, points in curves.items()
        )


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _difference(value: float) -> str:
    return "0, equal to the bit" if value == 0 else f"{value:.2g}"


def _shares(timeline: Timeline) -> str:
    """The parts of the idle time of all ranks, as shares of their time."""
    parts = map(sum, zip(*idle_of(timeline), strict=True))
    whole = timeline.num_ranks * timeline.makespan
    return " + ".join(f"{100 * part / whole:.1f}" for part in parts) + " %"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
