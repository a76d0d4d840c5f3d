"""The mistakes with checkpoints, stops and resumes that ``mutations.py`` tries: what, file, old, new, test."""

_FAULTS = "tests/test_checkpoint_faults.py"
_HOSTILE = "tests/test_checkpoint_hostile.py"
_RESUME = "tests/test_resume.py"
_STEPS = "meshtron/checkpoint/steps.py"
_CHECKPOINTER = "meshtron/checkpoint/checkpointer.py"
CHECKPOINT_MUTATIONS = (
    (
        "a second run in a folder is not kept out",
        "meshtron/run_lock.py",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        f"{_RESUME} -k second_run",
    ),
    (
        "leftovers of a kill stay",
        _CHECKPOINTER,
        "lambda: steps.clear_leftovers(self.folder)",
        "lambda: []",
        f"{_FAULTS} -k leftovers_are_named",
    ),
    (
        "a step that a kill caught between two renames is thrown away",
        _STEPS,
        "            leftover.rename(final)\n",
        "            _remove(leftover)\n",
        f"{_FAULTS} -k kill_before",
    ),
    (
        "a step is written under its final name",
        _STEPS,
        "    return _beside(step_folder(folder, step), WRITING)",
        "    return step_folder(folder, step)",
        f"{_FAULTS} -k kill_before",
    ),
    (
        "a save does not wait for the one in flight",
        _CHECKPOINTER,
        "        self.wait()\n        doing = ",
        "        doing = ",
        f"{_FAULTS} -k waits_for_the_one_in_flight",
    ),
    (
        "an error in training leaves the save in flight behind",
        _CHECKPOINTER,
        "            self._thread.join(_IN_FLIGHT_S)",
        "            pass",
        f"{_FAULTS} -k lets_the_save_in_flight_end",
    ),
    (
        "an async save writes what training changes meanwhile",
        _CHECKPOINTER,
        "[header, staged]",
        "itertools.chain([header], _pieces(boxes, spans))",
        "tests/test_checkpoint.py -k private_copy",
    ),
    (
        "a failure in the background is forgotten",
        _CHECKPOINTER,
        "            self._failure = error\n",
        "            pass\n",
        f"{_RESUME} -k 'disk_that_fails and 28'",
    ),
    (
        "hashes are not compared",
        "meshtron/checkpoint/verify.py",
        "    if found == record:",
        "    if found.size == record.size:",
        f"{_FAULTS} -k 'flipped and rank-00000'",
    ),
    (
        "retention counts steps that are not whole",
        _STEPS,
        "in whole_steps(folder)[:-keep_last]",
        "in named_steps(folder)[:-keep_last]",
        f"{_FAULTS} -k retention_counts",
    ),
    (
        "links in a step folder are followed",
        "meshtron/checkpoint/untrusted.py",
        " | os.O_NOFOLLOW",
        "",
        f"{_HOSTILE} -k links_are_refused",
    ),
    (
        "a later format is taken for damage",
        "meshtron/checkpoint/verify.py",
        "    except CheckpointFormatError:\n        raise\n",
        "",
        f"{_HOSTILE} -k later_format_is_refused",
    ),
    (
        "a new run begins from weights in the folder it takes them from",
        "meshtron/resume.py",
        "        if weights_only:\n            raise",
        "        if False:\n            raise",
        f"{_RESUME} -k cannot_begin",
    ),
    (
        "random streams are not taken up again",
        "meshtron/resume.py",
        '    torch.set_rng_state(state["torch"])\n',
        "",
        f"{_RESUME} -k 'stops_after_every_step and 1x2x1'",
    ),
    (
        "other content of the same size is taken for the same data",
        "meshtron/data/sampler.py",
        "self.size == size and (self.content == content or not self.content or not content)",
        "self.size == size",
        "tests/test_data_stages.py -k other_content",
    ),
    (
        "a step that is not finite is taken",
        "meshtron/loop.py",
        "only_if=finite & (norm != 0)",
        "only_if=(norm != 0)",
        f"{_RESUME} -k 'step_that_is_not_finite and 2x1x1-gradient'",
    ),
)
