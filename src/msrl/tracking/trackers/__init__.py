"""Trackers, one per file, selected by `log.trackers: [NAME]`.

A file defines:

- `open_tracker(run_dir: Path, *, resumed_step: int | None = None, ...) -> Tracker`, its main
  function. `resumed_step` is the last step of the checkpoint that a run resumes from; the other
  keyword arguments are the options of the tracker (`log.options`). The tracker has the methods
  `log(report: StepReport)`, called once per step, and `close()`.
- `check(options)`, called before the run. It raises MsrlError if the tracker cannot start on this
  machine.
"""
