"""Callbacks that report to experiment trackers: MLflow, Weights & Biases, OpenTelemetry.

A tracker is an optional package, imported when a fit begins. A tracker that cannot start is refused
before the first step; a later failure (a server that is away, also for a replaced rank 0 or a
resumed run, a full disk) is reported once, and training goes on without it. A replaced rank 0 and a
resumed run continue their run at the tracker, whose name is kept in the run directory.
"""

from __future__ import annotations

import abc
import contextlib
import math
import os
import sys
import threading
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from shoal.config.extras import install_command
from shoal.errors import ConfigError, Interrupted
from shoal.train.callbacks.base import Callback, StepLogs
from shoal.train.callbacks.logs import StepInterval, named_rates

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


CLOSE_S = 30.0
"""Time for a tracker to flush at the end of a fit. One that does not answer must not block the job."""


class FitOutcome(StrEnum):
    """How a fit ended, as MLflow names it."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"  # by a signal: it may be resumed


class Tracker(Callback, abc.ABC):
    """Base of trackers: metrics of steps and epochs as numbers by name, at a step."""

    package = ""
    """Its extra."""

    def __init__(self, *, every_steps: int = 10) -> None:
        """`every_steps`: report every so many steps, and every epoch."""
        self._interval = StepInterval(self, every_steps)
        self._is_open = False
        self._known = ""  # the run at the tracker: a later fit continues it
        self._before: tuple[float, int] | None = None

    @abc.abstractmethod
    def _open(self, trainer: Trainer, known: str, about: dict[str, Any]) -> str:
        """Begin, or continue `known`; returns its name there. `about` describes the run."""

    @abc.abstractmethod
    def _report(self, values: dict[str, float], step: int) -> None:
        """Report finite numbers."""

    @abc.abstractmethod
    def _close(self, outcome: FitOutcome) -> None:
        """Flush, and report the outcome."""

    def on_fit_begin(self, trainer: Trainer) -> None:
        if self._is_open:
            return  # a second fit of the same Trainer continues
        job = trainer.job
        note = trainer.run_dir / f"{self.package}.run"
        if job.launched and not self._known:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._known = note.read_text(encoding="utf-8").strip()
        is_first = not (self._known or trainer.step or job.incarnation)
        about = {
            **trainer.config.params,
            "run": job.name,
            "strategy": job.strategy,
            "workers": job.num_workers,
            "servers": job.num_servers,
            "seed": job.seed,
        }
        name = type(self).__name__
        try:
            opened = self._open(trainer, self._known, about)
        except Exception as error:
            if not is_first:  # a replacement or a resumed run: training matters more than reporting
                self._give_up(error)
                return
            if not isinstance(error, ImportError):
                raise ConfigError(
                    f"{name} could not begin: {type(error).__name__}: {error}. Nothing was trained; check its address and credentials, "
                    "or leave the callback out."
                ) from None
            raise ConfigError(
                f"the {name} callback needs a package that is not installed ({error}). Nothing was trained; install it with "
                f"`{install_command(self.package)}`, or leave the callback out."
            ) from None
        if job.launched and opened:
            with contextlib.suppress(OSError):  # then a resumed run is a new one there
                note.write_text(opened, encoding="utf-8")
        self._is_open, self._known, self._before = True, opened, None
        self._interval.begin(trainer.step)

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        if not self._is_open or not self._interval.is_due(logs.step):
            return
        now, samples = time.monotonic(), trainer.progress.position.samples
        values = {"loss": logs.loss, **named_rates(trainer.learning_rates)}
        if logs.grad_norm is not None:
            values["grad_norm"] = logs.grad_norm
        if self._before is not None and now > self._before[0]:
            values["samples_per_s"] = (samples - self._before[1]) / (now - self._before[0])
        self._before = now, samples
        self._try(values, logs.step)

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        if self._is_open:
            self._try({f"epoch/{name}": value for name, value in logs.items()}, trainer.step)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._end(FitOutcome.FINISHED)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        is_signal = isinstance(error, (Interrupted, KeyboardInterrupt))
        self._end(FitOutcome.KILLED if is_signal else FitOutcome.FAILED)

    def _end(self, outcome: FitOutcome) -> None:
        if self._is_open:
            self._is_open = False
            problems: list[Exception] = []
            closing = threading.Thread(target=self._close_into, args=(outcome, problems), daemon=True)
            closing.start()
            closing.join(CLOSE_S)
            if closing.is_alive():
                problems.append(TimeoutError(f"it took more than {CLOSE_S:.0f} s for what was left"))
            if problems:
                self._give_up(problems[0])

    def _close_into(self, outcome: FitOutcome, problems: list[Exception]) -> None:
        try:
            self._close(outcome)
        except Exception as error:
            problems.append(error)

    def _try(self, values: dict[str, float], step: int) -> None:
        try:
            self._report({name: float(value) for name, value in values.items() if math.isfinite(value)}, step)
        except Exception as error:  # a client may raise anything: training goes on
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_open = False
        print(
            f"note: {type(self).__name__} is left out from here on: {type(error).__name__}: {error}. Training goes on; metrics.jsonl has "
            "every step",
            file=sys.stderr,
            flush=True,
        )


class MLflow(Tracker):
    """Reports to an MLflow server, or to a local store.

    Args:
        tracking_uri: the server or store; by default MLFLOW_TRACKING_URI, or what MLflow itself takes.
        experiment: its name; by default "shoal".
        every_steps: report every so many steps.
    """

    package = "mlflow"

    def __init__(
        self, tracking_uri: str | None = None, *, experiment: str = "shoal", every_steps: int = 10
    ) -> None:
        super().__init__(every_steps=every_steps)
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run = ""

    def _open(self, trainer: Trainer, known: str, about: dict[str, Any]) -> str:
        from mlflow import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        if not known:
            found = client.get_experiment_by_name(self._experiment)
            experiment = (
                found.experiment_id if found is not None else client.create_experiment(self._experiment)
            )
            known = client.create_run(experiment, run_name=about["run"]).info.run_id
            for name, value in about.items():
                client.log_param(known, name, value)
        else:
            client.update_run(known, status="RUNNING")
        self._run = known
        return known

    def _report(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        # In MLflow's own thread: a slow server delays no step.
        self._client.log_batch(self._run, metrics=metrics, synchronous=False)

    def _close(self, outcome: FitOutcome) -> None:
        self._client._tracking_client.store.flush_async_logging()
        self._client.set_terminated(self._run, status=outcome.value)


class WandB(Tracker):
    """Reports to Weights & Biases; with mode="offline" into the run directory, for `wandb sync` later.

    Args:
        project: its name there; by default "shoal".
        mode: "online", "offline" or "disabled"; by default WANDB_MODE, else online.
        every_steps: report every so many steps.
    """

    package = "wandb"

    def __init__(self, project: str = "shoal", *, mode: str | None = None, every_steps: int = 10) -> None:
        super().__init__(every_steps=every_steps)
        if mode not in (None, "online", "offline", "disabled"):
            raise ConfigError(f"WandB's mode must be 'online', 'offline' or 'disabled', got {mode!r}.")
        self._project, self._mode = project, mode
        self._run: Any = None

    def _open(self, trainer: Trainer, known: str, about: dict[str, Any]) -> str:
        import wandb

        trainer.run_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            name=about["run"],
            id=known or None,
            resume="allow" if known else None,
            config=about,
            mode=self._mode,
            dir=os.fspath(trainer.run_dir),
            settings=wandb.Settings(silent=True, console="off"),
        )
        return str(self._run.id)

    def _report(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def _close(self, outcome: FitOutcome) -> None:
        self._run.finish(exit_code=int(outcome is not FitOutcome.FINISHED))


class OpenTelemetry(Tracker):
    """Reports metrics by OpenTelemetry: `shoal.loss`, `shoal.samples_per_s`, ... with run, strategy and workers as attributes.

    Goes to the MeterProvider that the script has set, if any; else by OTLP over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT.

    Args:
        every_steps: record every so many steps; how often they are sent is OTEL_METRIC_EXPORT_INTERVAL.
    """

    package = "opentelemetry"

    def __init__(self, *, every_steps: int = 10) -> None:
        super().__init__(every_steps=every_steps)
        self._gauges: dict[str, Any] = {}
        self._meter: Any = None
        self._provider: Any = None
        self._attributes: dict[str, Any] = {}

    def _open(self, trainer: Trainer, known: str, about: dict[str, Any]) -> str:
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider

        provider = metrics.get_meter_provider()
        if not isinstance(provider, MeterProvider):
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource

            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
            resource = Resource.create({"service.name": "shoal"})
            provider = self._provider = MeterProvider([reader], resource=resource)
        self._meter = provider.get_meter("shoal")
        self._attributes = {key: about[key] for key in ("run", "strategy", "workers")}
        return ""

    def _report(self, values: dict[str, float], step: int) -> None:
        for name, value in {**values, "step": float(step)}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"shoal.{name.replace('/', '.')}")
            self._gauges[name].set(value, self._attributes)

    def _close(self, outcome: FitOutcome) -> None:
        if self._provider is not None:
            self._provider.shutdown()
            self._provider, self._gauges = None, {}
