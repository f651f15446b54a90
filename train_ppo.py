"""KL-regularised PPO for language models; every rank runs this same program.

    torchrun --nproc_per_node=8 train_ppo.py --config ppo.yaml [key.sub=value ...]
    python train_ppo.py --config ppo.yaml --check        # mesh, batch arithmetic, memory; no GPU
    python train_ppo.py --suggest --model NAME --gpus 8  # a configuration that passes it

One iteration, on every rank, in this order (the numbers of the README's figure):

    1 generate    the engine gets the actor's weights, samples, and gives its memory back
    2 score       rewards; a sample whose reward failed is masked out; each rank gets its rows
    3 log-probs   old (actor) and ref log-probs, values (critic): forward passes only
    4 advantages  KL penalty in the reward, then GAE, GRPO, ..., with statistics of all ranks
    5 critic      mini-batches -> micro-batches -> one optimizer step each
    6 actor       the same, with the clipped policy loss
    7 finish      log, maybe validate, maybe save

A sample is scored where it was made; then every rank knows the lengths and scores of all, and holds
the tokens of its own rows alone. No result depends on which rank has which. Everything that must
survive a restart is in TrainState: sampling noise, shuffles and schedules are functions of (seed,
step).
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from ppo.check.commands import before_torch, run_check

if __name__ == "__main__" and (code := before_torch(sys.argv[1:], os.environ)) is not None:
    sys.exit(code)  # what is wrong, or the plan, is said before torch is imported

from torch.distributed.elastic.multiprocessing.errors import record

from ppo.batch.packing import Batcher, Batchers, make_batchers
from ppo.batch.samples import RolloutBatch, Samples
from ppo.batch.shares import overview_of, owners_of, share_out
from ppo.config import Config, load_config, parse_args, values_of
from ppo.data.printable import PrintableIds
from ppo.data.prompts import total_steps_of
from ppo.engines.agreement import check_agreement
from ppo.forward_passes import response_logprobs, response_values
from ppo.metrics import Metrics
from ppo.models.roles import Models, build_models
from ppo.rollout.collector import open_collector
from ppo.rollout.filter import GroupPool
from ppo.rollout.logged_samples import log_samples
from ppo.rollout.prompts import check_tokenizer_of_ref, open_prompts
from ppo.rollout.samples import kept_on_failure
from ppo.rollout.scoring import build_scorer, open_rewards
from ppo.rollout.validation import validate
from ppo.run.run import Run, StopRequested
from ppo.run.start import Launch, open_run, program
from ppo.state.checkpoints import find_start, load_models, open_checkpoints, save_checkpoint
from ppo.state.rollback import obey_guards
from ppo.state.train_state import new_state
from ppo.step_metrics import perf_metrics, summarise_batch, watch_for_degeneration
from ppo.tracking.board import About
from ppo.tracking.profiler import StepProfiler
from ppo.tracking.tracker import Tracker
from ppo.update import (
    Running,
    add_advantages,
    epoch_mini_batches,
    needs_old_logprobs,
    update_actor,
    update_critic,
)

logger = logging.getLogger("train_ppo")


def train(config: Config, run: Run) -> None:
    """Set up, then the loop. Runs on every rank with the process group up."""
    config = run.after_out_of_memory(config)
    with ExitStack() as owned:
        prompts = open_prompts(config, run)
        check_tokenizer_of_ref(config, run, prompts)
        sampler = prompts.sampler(config)
        total_steps = total_steps_of(config, sampler)
        checkpoints = owned.enter_context(open_checkpoints(config, run, prompts))
        running = Running(config)
        state = new_state(config, sampler, run.mesh, running)
        # what a resume may not change is refused here, before models are built
        start = find_start(config, run, checkpoints, state)
        trains, total_steps = not config.trainer.val_only, state.last_step(total_steps, {}, run)
        validates = bool(prompts.val) and state.validation_due
        if trains and state.step >= total_steps and not validates:
            logger.info("nothing to train: %s is of step %d of %d", start, state.step, total_steps)
            return run.nothing_left(state.step)
        # before models: a reward that cannot work is said within seconds
        run.clock.mark("prompts")
        pool = owned.enter_context(open_rewards(config, run, prompts))
        run.clock.mark("rewards")
        models = build_models(config, run.mesh, run.dir, total_steps, num_ids=prompts.num_ids)
        run.clock.mark("models")
        actor, critic, ref = models
        scorer = build_scorer(config, run, prompts, pool)
        if start is not None:  # into the tensors where they rest
            start = load_models(config, run, checkpoints, models, state, start)
            run.clock.mark("checkpoint")
        # last of what takes device memory: an engine sizes its cache by what is free then, and
        # what a start needs besides must not come out of it
        collector = owned.enter_context(open_collector(config, run, prompts, actor))
        guard, is_text = state.guard, PrintableIds(prompts.tokenizer, collector.stop_token_ids)
        batchers = make_batchers(config, run.mesh, models, halvings=guard.state.halvings)
        run.clock.mark("engine")
        # nothing can be refused any more: from here on this start writes the record of the run
        run.begin(step=state.step, anew=start is None or not checkpoints.owns(start))
        if start is not None and trains:
            checkpoints.make_newest(start)
        names = config.trainer.project_name, config.trainer.experiment_name or run.dir.name
        about = About(run.record, *names, config=values_of(config))
        writes, loggers, ends = run.mesh.rank == 0, config.trainer.logger, (StopRequested,)
        tracker = owned.enter_context(
            Tracker(run.record, enabled=writes, loggers=loggers, about=about, good_ends=ends)
        )
        profiler = StepProfiler(run.record, config.trainer.profile_steps, run.mesh)
        going_back = config.trainer.resume_path is not None
        after = None if start is None else state.step
        run.attempt(lambda: tracker.truncate(after, keep=going_back))

        def test(metrics: Metrics) -> None:
            state.validation_due = True
            try:
                with metrics.timed("testing"):
                    validate(collector, scorer, prompts.val, tracker, metrics, step=state.step)
                state.validation_due = False
            except StopRequested:
                logger.info("validation abandoned: a stop is requested; a resume repeats it")

        def save(metrics: Metrics, values: Mapping[str, float]) -> None:
            with metrics.timed("save_checkpoint"):
                save_checkpoint(config, checkpoints, models, state, values)

        def save_if_stopped(kind: type[BaseException] | None, *_: object) -> None:
            if kind is StopRequested and config.trainer.save_freq >= 0:
                if state.step > checkpoints.saved_step:
                    save(Metrics(), {})
                checkpoints.finish()  # what is not saved is not preempted, but failed

        owned.push(save_if_stopped)
        owned.push(run.note_failure)  # first: what is closed on the way out may fail too
        metrics = Metrics(run.mesh.device)
        if config.trainer.val_only:
            test(metrics)
            tracker.log(state.step, metrics.reduce(run.mesh.host_group))
            return
        if validates:  # before the first iteration, or what a stop has interrupted
            test(metrics)
            values = metrics.reduce(run.mesh.host_group)
            tracker.log(state.step, values)
            total_steps = state.last_step(total_steps, values, run)
            metrics = Metrics(run.mesh.device)
            if state.step > 0 and config.trainer.save_freq >= 0 and not state.validation_due:
                save(metrics, values)

        if guard.can_roll_back and (start is None or not checkpoints.owns(start)):
            save(metrics, {})
        groups, is_first = GroupPool(config, run.mesh, sampler, state.surplus()), True
        while state.step < total_steps:
            step = state.step + 1
            with metrics.timed("step"):
                while groups.wants_more():  # once; with filter_groups until enough groups differ
                    # 1 generate: weights go to the engine, whose memory comes back afterwards
                    with metrics.timed("gen"), collector.awake(metrics):
                        samples = collector.sample_training(
                            *(sampler.next_batch(), metrics, step, scorer.begin), round=groups.round
                        )
                    # 2 score
                    with metrics.timed("reward"), kept_on_failure(tracker, scorer, samples, step):
                        scorer.score(samples, metrics, training=True)
                    groups.add(samples)
                # every rank gets the rows that it computes with
                samples = groups.take(metrics)
                batch = first_layout(samples, config, batchers.actor, step)
                # 3 log-probs and values
                add_logprobs_and_values(batch, models, batchers, config, run, metrics, step)
                # 4 advantages
                with metrics.timed("adv"):
                    ranks, factor = run.mesh.dp_group, guard.state.kl_factor
                    control = state.kl_controller
                    add_advantages(batch, config, control, metrics, ranks, factor, running)
                skips = guard.before_update(step, metrics.known)
                # 5 critic
                if critic is not None and not skips:
                    with metrics.timed("update_critic"):
                        update_critic(critic, batch, config, batchers.critic, metrics, step, guard)
                # 6 actor
                if guard.trains_actor(step) and not skips:
                    recorded = profiler.window(step, actor.optimizer)
                    with recorded, metrics.timed("update_actor"):
                        update_actor(
                            actor, batch, config, batchers.actor, metrics, step, guard, ref
                        )
            # 7 finish: from here on the iteration counts
            state.commit(groups.surplus())
            run.clock.mark("first_iteration")
            if not sampler.has_next():  # with filter_groups a step draws several batches
                total_steps = step
            run.status("running", step)
            metrics.set("training/global_step", step)
            metrics.set("training/epoch", sampler.epoch)
            summarise_batch(batch, batchers.actor, metrics)
            watch_for_degeneration(batch, batchers.actor, metrics, is_text)
            for name, value in profiler.report().items():
                metrics.maximum(name, value)
            if prompts.val and due(step, config.trainer.test_freq, total_steps):
                test(metrics)
            values = metrics.reduce(run.mesh.host_group)
            values |= perf_metrics(values, batch, models.actor, models.critic, config, run.mesh)
            values["response_length/drift"] = state.length_drift(values["response_length/mean"])
            values |= guard.after_step(step, values)
            tracker.log(step, values)
            if is_first:
                check_agreement(config, values, run.mesh)
                is_first = False
            log_samples(tracker, scorer, samples, batch, prompts.tokenizer, step)
            metrics = Metrics(run.mesh.device)  # the save's time goes into the next row
            if obey_guards(config, run, checkpoints, models, state, tracker.mark_undone):
                state.surplus = groups.drop_surplus()  # samples of weights that are undone
                values = {}  # nor are they what early_stop and keep_best judge
            total_steps = state.last_step(total_steps, values, run)
            if due(step, config.trainer.save_freq, total_steps):
                save(metrics, values)
            if run.should_stop():
                run.raise_stop()


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps is due: at last too; 0 = then only, -1 =
    never."""
    return every >= 0 and (step == last or (every > 0 and step % every == 0))


def first_layout(samples: Samples, config: Config, batcher: Batcher, step: int) -> RolloutBatch:
    """Each rank's rows: equal parts of every mini-batch of the actor's first epoch. Collective."""
    overview, holders = overview_of(samples, batcher.mesh)
    parts = epoch_mini_batches(overview, config.actor, seed=config.trainer.seed, step=step)
    owners = owners_of(overview, parts, batcher.budget)
    return share_out(samples, overview, holders, owners, batcher.mesh)


def add_logprobs_and_values(
    batch: RolloutBatch,
    models: Models,
    batchers: Batchers,
    config: Config,
    run: Run,
    metrics: Metrics,
    step: int,
) -> None:
    """Forward passes without gradients: old and ref log-probs, values.

    The old log-probs use the partition of the update, so that its first ratio is exactly 1.
    """
    actor, critic, ref = models
    logprobs = partial(response_logprobs, run=run, temperature=config.rollout.temperature)
    everything = [list(range(len(batch.all)))]
    parts = epoch_mini_batches(batch.all, config.actor, seed=config.trainer.seed, step=step)
    if config.algorithm.correction.bypass_old_logprob:
        batch.old_logprobs, batch.bypasses_old = batch.rollout_logprobs, True
    elif needs_old_logprobs(config, len(parts)):
        with metrics.timed("old_log_prob"), actor.on_device() as module:
            batch.old_logprobs = logprobs(
                module, batch, parts, batcher=batchers.actor, metrics=metrics
            )
    if ref is not None:
        # the actor without adapters is laid out as the actor, so that the first KL is exactly 0
        layout = parts if config.ref_is_actor else everything
        with metrics.timed("ref"), ref.on_device() as module:
            batch.ref_logprobs = logprobs(
                module, batch, layout, batcher=batchers.ref, keep_hidden=config.actor.full_kl
            )
    if critic is not None:
        with metrics.timed("values"), critic.on_device() as module:
            batch.values = response_values(module, batch, batcher=batchers.critic, run=run)


def start(launch: Launch, words: Sequence[str]) -> int:
    """Plan or train, as the command line says; the exit code."""
    args = parse_args(words)
    if args.check:
        return run_check(args)
    config = load_config(args.config, args.overrides, check=launch.problems)
    with open_run(config, launch, sys.argv) as run:
        train(config, run)
    return run.exit_code


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 finished, stopped or checked; 2 wrong configuration, data or weights."""
    return program(start, os.environ, argv)


if __name__ == "__main__":
    sys.exit(main())
