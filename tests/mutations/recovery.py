"""Mutations that each remove one protection of recovery, and the test that detects each.

Owns the list. The named test alone must detect the mutation, so that a failure says what is missing, and so that all of
them together take two minutes.
"""

from tests.mutations.edits import Edit as _Edit
from tests.mutations.edits import (
    assigned,
    attribute,
    call,
    comparison,
    condition,
    drop,
    insert_before,
    replace,
    returned,
)
from tests.mutations.mutation import Mutation

_CORE, _JOURNAL, _SHELL = "tests/scheduler_svc/core", "tests/scheduler_svc/journal", "tests/scheduler_svc/shell"

_KEPT = f"{_JOURNAL}/test_kept_pages.py"
_QUARANTINE = f"{_CORE}/suspicion/test_quarantine.py"
_SHARES = f"{_CORE}/test_tenant_shares.py::test_a_greedy_tenant_at_most_doubles_the_wait_of_a_polite_one"


def _protection(name: str, breaks: str, module: str, test: str, *edits: _Edit) -> Mutation:
    return Mutation(name=name, breaks=breaks, module=f"scheduler_svc.{module}", edits=edits, test=test)


RECOVERY: tuple[Mutation, ...] = (
    # Requests that kill their workers ---------------------------------------------------------------------------------
    _protection(
        "a-trial-on-two-lanes",
        "a trial begins on a second lane while a member has a row on one that waits for new weights",
        "core.schedule.trials",
        f"{_CORE}/test_new_weights.py::test_a_trial_stays_on_a_lane_that_waits_for_new_weights",
        replace("trial_lane", condition("worker"), "it and lane.weights.admits"),
    ),
    _protection(
        "no-suspects-after-a-death",
        "the requests in flight at a worker's death run together again",
        "core.workers.lanes",
        f"{_CORE}/suspicion/test_bisection.py::test_one_culprit_among_64_causes_at_most_8_deaths",
        drop("Lanes.close", call("suspects.implicate")),
    ),
    _protection(
        "no-bisection",
        "suspects are tried in one group again and again",
        "core.suspicion.suspect",
        f"{_CORE}/suspicion/test_bisection.py::test_one_culprit_among_64_causes_at_most_8_deaths",
        replace("halves", assigned("half"), "len(handles)"),
    ),
    _protection(
        "conviction-after-one-lone-death",
        "a request that was alone once when its worker was killed is convicted",
        "core.suspicion.suspect",
        f"{_CORE}/suspicion/test_bisection.py",
        replace("LONE_DEATHS", assigned("LONE_DEATHS"), "1"),
    ),
    _protection(
        "conviction-without-control",
        "a machine on which every worker dies convicts its requests",
        "core.suspicion.suspect",
        f"{_CORE}/suspicion/test_doubts.py",
        replace("Suspect.died_alone", comparison("control"), "True"),
    ),
    _protection(
        "conviction-without-doubt",
        "requests are convicted while workers die without them, too",
        "core.suspicion.suspect",
        f"{_CORE}/suspicion/test_doubts.py::test_a_lone_death_does_not_count_if_another_worker_died_after_it",
        replace("Suspect.died_alone", condition("doubts"), "False"),
    ),
    _protection(
        "suspects-never-cleared",
        "a suspect that got past its position stays one",
        "core.suspicion.suspects",
        f"{_CORE}/test_worker_failures.py",
        replace("Suspects.confirmed", condition("must_pass"), "False"),
    ),
    _protection(
        "no-quarantine",
        "a request that killed its workers is accepted again",
        "core.requests.refusals",
        f"{_QUARANTINE}::test_a_convicted_request_is_refused_without_a_death",
        replace("Refusals._refusal", call("quarantine.refusal"), "''"),
    ),
    _protection(
        "quarantine-forever",
        "a quarantined request is refused for ever",
        "core.suspicion.quarantine",
        f"{_QUARANTINE}::test_an_entry_expires",
        replace("Quarantine.entries", condition("_seconds"), "False"),
    ),
    # Hung workers and crash loops -------------------------------------------------------------------------------------
    _protection(
        "no-deadline-of-a-step",
        "a worker that hangs in a step is never given up",
        "core.limits.step_clock",
        f"{_CORE}/test_hung_workers.py::test_short_steps_have_three_seconds",
        replace("StepClock.timeout", call("began_at"), "it + 1e9"),
    ),
    _protection(
        "silence-allowed",
        "an idle worker that is silent is never given up",
        "core.limits.step_clock",
        f"{_CORE}/test_hung_workers.py::test_an_idle_worker_has_three_seconds_of_silence",
        replace("StepClock.timeout", attribute("silence_timeout_seconds"), "1e9"),
    ),
    _protection(
        "a-pause-of-the-scheduler-counts",
        "workers are given up because the scheduler itself stood still",
        "core.limits.step_clock",
        f"{_CORE}/test_hung_workers.py::test_time_in_which_the_scheduler_did_not_run_does_not_count",
        replace("StepClock.paused", assigned("heard_at"), "0.0"),
        replace("StepClock.paused", assigned("_paused_seconds"), "0.0"),
    ),
    _protection(
        "lost-result-overlooked",
        "a result that was lost on the way is missed until its step is overdue",
        "core.faults.lost_frames",
        f"{_CORE}/test_lost_frames.py::test_a_lost_result_is_noticed_by_the_next_heartbeat",
        replace("_what_was_lost", comparison("generation"), "False"),
    ),
    _protection(
        "lost-plan-overlooked",
        "a plan that was lost on the way is missed until its step is overdue",
        "core.faults.lost_frames",
        f"{_CORE}/test_lost_frames.py::test_a_lost_plan_is_noticed_once_it_should_have_arrived",
        replace("_what_was_lost", comparison("_PLAN_SECONDS"), "False"),
    ),
    _protection(
        "plan-on-its-way-counts-as-lost",
        "a heartbeat that was sent before a plan arrived resets the lane",
        "core.faults.lost_frames",
        f"{_CORE}/test_lost_frames.py::test_a_lost_plan_is_noticed_once_it_should_have_arrived",
        replace("_what_was_lost", comparison("_PLAN_SECONDS"), "True"),
    ),
    _protection(
        "plan-lost-in-a-pause",
        "a heartbeat that waited while the scheduler stood still resets the lane",
        "core.faults.lost_frames",
        f"{_CORE}/test_lost_frames.py::test_a_heartbeat_that_is_read_after_a_pause_does_not_void_the_plan",
        replace("_what_was_lost", call("began_at"), "oldest.sent_at"),
    ),
    _protection(
        "removed-key-stays",
        "a worker of another host whose key was removed goes on",
        "shell.remote_link",
        f"{_SHELL}/test_remote_link.py::test_a_removed_key_ends_its_connection_and_no_other",
        replace("RemoteLink.check", assigned("expelled"), "[]"),
    ),
    _protection(
        "every-key-admitted",
        "whoever has the scheduler's public key joins as a worker",
        "remote.key_check",
        f"{_SHELL}/test_remote_link.py::test_the_log_names_few_of_many_refused_keys",
        replace("KeyCheck._answer", comparison("names"), "True"),
    ),
    _protection(
        "no-kill",
        "a hung worker keeps running",
        "core.faults.hung_workers",
        f"{_CORE}/test_hung_workers.py::test_short_steps_have_three_seconds",
        replace("HungWorkers.give_up", call("KillWorker"), "fx.Note(message='')"),
    ),
    _protection(
        "kills-processes-of-others",
        "a hung worker that somebody else started and watches is killed",
        "processes.workers",
        "tests/scheduler_svc/processes/test_workers.py",
        replace("WorkerProcesses.joined", comparison("_parent_and_user"), "True"),
    ),
    _protection(
        "deadline-of-cheap-steps",
        "a worker is given up at its first long prompt, because the steps before were short",
        "core.limits.step_time",
        f"{_CORE}/limits/test_step_time.py::test_cheap_steps_before_never_make_a_costly_step_too_small",
        replace("StepTimes.predict", call("_bound"), "min(known.values())"),
    ),
    _protection(
        "memory-limits-for-ever",
        "a lane stays slow after one step ran out of memory",
        "core.limits.memory_limit",
        f"{_CORE}/limits/test_memory_limit.py::test_limits_recover_after_confirmed_steps",
        replace("MemoryLimit.confirmed", comparison("_recovery_steps"), "True"),
    ),
    _protection(
        "no-crash-loop",
        "requests are accepted although every worker dies at once",
        "core.workers.crash_loop",
        f"{_CORE}/test_worker_failures.py {_CORE}/schedule/test_probation.py",
        replace("CrashLoop.cause", comparison("DEATHS"), "True"),
    ),
    _protection(
        "no-smaller-step-without-memory",
        "a step that ran out of memory is repeated as it was",
        "core.limits.memory_limit",
        f"{_CORE}/limits/test_memory_limit.py::test_the_token_budget_halves_while_chunks_are_in_the_step",
        drop("MemoryLimit.ran_out", assigned("token_budget")),
    ),
    # Lanes and results ------------------------------------------------------------------------------------------------
    _protection(
        "generation-unchecked",
        "the result of a void plan is applied",
        "core.steps",
        f"{_CORE}/test_lanes.py::test_a_result_with_the_generation_of_another_lane_is_ignored",
        replace("Steps.read", condition("generation"), "False"),
    ),
    _protection(
        "step-order-unchecked",
        "the result of another step is applied to the oldest plan",
        "core.steps",
        f"{_CORE}/test_lanes.py {_CORE}/test_refused_workers.py",
        replace("Steps.read", comparison("step"), "False"),
    ),
    _protection(
        "results-unchecked",
        "malformed results are applied",
        "core.steps",
        f"{_CORE}/test_refused_workers.py",
        replace("Steps.read", call("is_valid"), "True"),
    ),
    _protection(
        "pages-of-void-plans-kept",
        "pages that an unconfirmed step wrote stay in the index after a reset",
        "core.state.lane",
        f"{_CORE}/schedule/test_cached_pages.py",
        replace("evict_pages_of", condition("hash_of"), "False"),
    ),
    _protection(
        "unverified-pages-not-zeroed",
        "a page with values that are not finite is given to the next request as it is",
        "core.pages.page_pool",
        f"{_CORE}/test_worker_failures.py",
        replace("PagePool.take_unverified", returned, "[]"),
    ),
    _protection(
        "no-probation",
        "a process that only sends a Join gets requests",
        "core.workers.lanes",
        f"{_CORE}/schedule/test_probation.py::test_an_unproven_worker_changes_no_limits_and_gets_no_request",
        replace("Lanes.join", condition("prove_workers"), "True"),
    ),
    _protection(
        "requests-for-a-standby-worker",
        "a worker on standby gets requests before it is seated",
        "core.steps",
        f"{_CORE}/test_standby.py::test_a_standby_worker_gets_one_probation_step_and_no_request",
        replace("Steps.plan", condition("is_seated"), "False"),
    ),
    _protection(
        "no-takeover",
        "a standby worker stays unseated when the serving one is lost",
        "core.workers.lanes",
        f"{_CORE}/test_standby.py::test_the_loss_of_the_serving_worker_seats_the_standby_worker_in_the_same_event",
        replace("Lanes.close", call("seat_next"), "[]"),
    ),
    # Resume and journal -----------------------------------------------------------------------------------------------
    _protection(
        "any-secret-resumes",
        "a caller without the secret reads another caller's stream",
        "core.lingering.kept_requests",
        f"{_CORE}/test_lingering.py::test_a_wrong_secret_and_an_unknown_id_have_the_same_answer",
        replace("KeptRequests.authorized", call("compare_digest"), "True"),
    ),
    _protection(
        "linger-without-end",
        "a request whose caller never comes back runs on",
        "core.lingering.kept_requests",
        f"{_CORE}/test_lingering.py::test_a_detached_request_is_freed_when_its_time_is_over",
        insert_before("KeptRequests.pop_expired", assigned("heap"), "return None"),
    ),
    _protection(
        "two-readers",
        "the first reader of a resumed request is not told that it was replaced",
        "core.lingering.lingering",
        f"{_CORE}/test_lingering.py::test_a_second_reader_replaces_the_first",
        drop("Lingering.resume", call("effects.append")),
    ),
    _protection(
        "journal-checksum-unread",
        "a journal with changed bytes is believed",
        "journal.framing",
        f"{_JOURNAL}/test_framing.py::test_any_changed_bit_is_damage_in_its_frame",
        replace("Frames.__iter__", comparison("checksum"), "False"),
    ),
    _protection(
        "journal-shared",
        "two schedulers write one journal",
        "journal.folder",
        f"{_JOURNAL}/test_writer.py::test_two_schedulers_never_share_a_folder",
        drop("JournalFolder.__init__", call("flock")),
    ),
    _protection(
        "journal-after-the-front-end",
        "a token is sent before it is in the journal",
        "shell.loop",
        f"{_SHELL}/test_loop.py::test_the_journal_is_written_before_a_front_end_gets_the_turn",
        drop("Loop.run", call("_journal.write")),
    ),
    _protection(
        "old-journal-on-a-full-disk",
        "a journal that misses the newest tokens is read by the next scheduler",
        "journal.writer",
        f"{_JOURNAL}/test_writer.py::test_a_full_disk_removes_the_journal_and_a_later_snapshot_brings_it_back",
        drop("JournalWriter._remove", call("unlink")),
    ),
    _protection(
        "damaged-journal-restored",
        "requests of a journal with a damaged record go on without the tokens in it",
        "journal.reader",
        f"{_JOURNAL}/test_reader.py::test_a_changed_byte_anywhere_restores_no_request_and_keeps_the_file",
        replace("_restored", comparison("DAMAGED"), "False"),
    ),
    _protection(
        "gap-in-a-journal",
        "a sample goes on although one of its tokens is missing",
        "journal.reader",
        f"{_JOURNAL}/test_reader.py::test_a_gap_in_a_sample_restores_no_request",
        replace("_whole_output", call("array_equal"), "True"),
    ),
    _protection(
        "dead-content-kept",
        "the content of a request stays in the journal after its linger time",
        "journal.writer",
        f"{_JOURNAL}/test_writer.py::test_dropped_content_is_erased_within_31_seconds",
        replace("JournalWriter.maintain", assigned("is_dead"), "False"),
    ),
    _protection(
        "appends-lost-while-rewriting",
        "what is appended while the next file is written aside is not in it",
        "journal.writer",
        f"{_JOURNAL}/test_writer.py::test_a_large_file_of_dead_content_is_rewritten_and_misses_no_append",
        replace("JournalWriter.append", call("filter"), "(self._file,)"),
    ),
    _protection(
        "generations-from-zero",
        "a result of a plan of the dead scheduler counts for a plan of the next one",
        "journal.keeper",
        f"{_JOURNAL}/test_recovery.py::test_requests_continue_where_they_were",
        replace("OpenedJournal.__init__", assigned("first_generation"), "0"),
    ),
    _protection(
        "another-model-continues",
        "a restored request goes on with another model",
        "core.lingering.restored",
        f"{_JOURNAL}/test_recovery.py::test_requests_of_another_model_fail",
        replace("restored_ending", comparison("identity"), "False"),
    ),
    _protection(
        "label-of-an-unconfirmed-page",
        "a page whose step may never run is kept for the next scheduler",
        "core.pages.page_labels",
        _KEPT,
        insert_before(
            "LabelQueue.take", condition("_forget"), "self._pages.update(dict.fromkeys(pool.cached_pages()))"
        ),
        replace("LabelQueue.take", condition("is_unverified"), "page_hash is not None"),
    ),
    _protection(
        "kept-pages-of-another-root",
        "pages are kept for a scheduler that does not continue the one that labelled them",
        "core.workers.held_pools",
        f"{_KEPT}::test_a_core_without_the_journal_takes_no_page",
        replace("_agrees", comparison("page_root"), "True"),
    ),
    _protection(
        "kept-pages-newer-than-the-journal",
        "pages are kept for a scheduler with an older copy of the journal",
        "core.workers.held_pools",
        f"{_KEPT}::test_a_core_with_an_older_copy_of_the_journal_takes_no_page",
        replace("_agrees", comparison("generation"), "True"),
    ),
    _protection(
        "pages-not-kept-are-not-zeroed",
        "a page that a worker has not kept is given to a request as it is",
        "core.pages.page_pool",
        f"{_KEPT}::test_restored_requests_recompute_less_than_a_page_and_what_was_in_flight",
        drop("PagePool.restore", assigned("_unverified")),
    ),
    _protection(
        "labels-after-distrust",
        "a worker that was out of step keeps the labels of its pages",
        "core.pages.page_labels",
        f"{_KEPT}::test_a_worker_out_of_step_forgets_its_pages",
        drop("LabelQueue.lane_reset", assigned("_forget")),
    ),
    # Peers ------------------------------------------------------------------------------------------------------------
    _protection(
        "any-key-joins",
        "a worker without the key of the runtime folder joins",
        "shell.inbound",
        f"{_SHELL}/test_loop.py::test_a_worker_without_the_key_is_refused_and_changes_nothing",
        replace("Inbound._from_worker", condition("is_worker_key"), "False"),
    ),
    _protection(
        "any-front-end-says-hello",
        "a process without the secret submits requests",
        "shell.inbound",
        f"{_SHELL}/test_loop.py::test_a_peer_without_the_secret_can_neither_submit_nor_disturb_a_front_end",
        replace("Inbound._check_frontend", condition("is_frontend_secret"), "False"),
    ),
    # Tenants ----------------------------------------------------------------------------------------------------------
    _protection(
        "rows-are-never-given-up",
        "a tenant with long outputs keeps all rows while another waits",
        "core.schedule.planner",
        f"{_SHARES}[outputs-none]",
        drop("make_room", call("builder.preempt")),
    ),
    _protection(
        "prompts-of-others-first",
        "a tenant's next request waits until all long prompts of another are computed",
        "core.schedule.planner",
        f"{_SHARES}[prompts-none]",
        replace("before_head", assigned("at"), "1 << 62"),
    ),
    _protection(
        "reserved-tokens-count-as-used",
        "a tenant that begins to wait does so behind the reserved tokens of others",
        "core.queue.tenant_queue",
        f"{_SHARES}[queue-none]",
        replace("TenantQueue.used", returned, "self.next_turn"),
    ),
    _protection(
        "no-place-for-others",
        "a tenant without limits fills the queue",
        "core.quotas",
        f"{_CORE}/test_tenant_shares.py::"
        "test_a_greedy_tenant_leaves_room_in_the_queue_and_another_has_places_of_its_own",
        replace("FREE_FACTOR", assigned("FREE_FACTOR"), "1_000_000"),
    ),
    _protection(
        "no-own-places",
        "a full queue shuts out a tenant that has nothing in it",
        "core.quotas",
        f"{_CORE}/test_tenant_shares.py::test_a_tenant_gets_its_own_places_in_a_full_queue",
        replace("OWN_SHARE", assigned("OWN_SHARE"), "0"),
    ),
    _protection(
        "no-retry-estimate",
        "a refusal for a full queue always says the least time",
        "core.quotas",
        f"{_CORE}/test_tenant_shares.py::test_a_full_queue_says_in_how_many_seconds_it_drains",
        replace("DrainRate.seconds", assigned("estimate"), "0.0"),
    ),
)
