"""The Trainer's parts as one class: what a run works with, without how a Trainer is made."""

from __future__ import annotations

from windlass.config.plan import RunPlan
from windlass.trainer.best import BestMixin, find_metric
from windlass.trainer.evaluation import EvaluationMixin
from windlass.trainer.leaving import LeavingMixin
from windlass.trainer.optimization import OptimizationMixin
from windlass.trainer.publishing import PublishingMixin


class TrainerParts(EvaluationMixin, OptimizationMixin, BestMixin, LeavingMixin, PublishingMixin):
    """Every method that a script may override or call, from the files that hold them."""

    _ignore_keys_for_eval: list[str] | None = None

    def _stop_here(self) -> None:
        """End the run with this update, and save."""
        self.control.should_training_stop = True
        self._interrupted = self._resumes_within_epoch = True

    def _evaluate_for_run(self) -> dict[str, float]:
        self._evaluates_for_run = True
        try:
            metrics = self.evaluate(ignore_keys=self._ignore_keys_for_eval)
        finally:
            self._evaluates_for_run = False
        if self._follows_metric:
            self._run.schedule.observe(find_metric(metrics, self.args.metric_for_best_model or "loss"))
        return metrics

    @property
    def _has_evaluation_data(self) -> bool:
        """An evaluation set, or methods of the script's own that may have one."""
        return self.eval_dataset is not None or not self._overridden.isdisjoint(
            ("get_eval_dataloader", "evaluate")
        )

    @property
    def _follows_metric(self) -> bool:
        return bool(getattr(self._run.schedule, "follows_metric", False))

    def _check_metric(self, plan: RunPlan) -> None:
        """Find out before the first update whether evaluation returns the metric that the run goes by."""
        metric = plan.save.metric or ("loss" if self._follows_metric else None)
        # What an override of these returns, only running it would tell.
        own = self._overridden & {"evaluate", "evaluation_loop"}
        if metric is None or plan.evaluation.strategy == "no" or own:
            return
        find_metric(self._rehearse_evaluation(metric), metric)
