"""Published suites that `msrl eval --benchmark` runs with lm-evaluation-harness, one per file.

The prompts, examples and rules of answers are those of the harness. A file defines constants, which
are read without importing it:

- `TASK`: Task or group of tasks of lm-evaluation-harness 0.4.13.
- `FOLDER`: Folder of the task in `lm_eval/tasks`.
- `COLUMNS`: Columns that a row must have.
- `METRIC`: Metric and filter of the harness that are the accuracy of the suite.
- `GENERATES`: Optionally True: answers are generated. Otherwise the likelihoods of choices decide,
  and by default no chat template is used.
- `CHAT_TASK`: Optionally, the task for models that are asked through a chat template.
- `SHOTS`: Optionally, the number of examples if the task leaves it open. Otherwise it is 0.
- `RUNS_CODE`: Optionally True: answers are programs that run in the sandbox.
- `NLTK_DATA`: Optionally, a resource of NLTK that the task needs.
"""
