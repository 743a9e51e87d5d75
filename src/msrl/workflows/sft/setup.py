"""Setup of a supervised fine-tuning run before its ranks start."""

from __future__ import annotations

from msrl.config.schema import Config
from msrl.data.dataset import SftDataset, check_templates
from msrl.plan.run_plan import RunPlan
from msrl.workflows.sft.rows import MixedRows, Rows, open_rows, split_rows
from msrl.workflows.sft.text_rows import TextRows, open_text, weights_by_name
from msrl.workflows.training.data_checks import check_longest_row, check_patches
from msrl.workflows.training.supervised import SupervisedSetup

ExampleRows = Rows | MixedRows
SftRows = ExampleRows | TextRows
SftSetup = SupervisedSetup[SftRows]


def training_rows(plan: RunPlan) -> tuple[SftRows, SftRows | None]:
    """Return the rows to train on and the held-out rows, if any. Raises MsrlError."""
    return open_text(plan) if plan.data.handler == "pretrain" else example_rows(plan)


def example_rows(
    plan: RunPlan, dataset_type: type[SftDataset] = SftDataset
) -> tuple[ExampleRows, ExampleRows | None]:
    """Return the rows of examples to train on and the held-out ones, if any. Raises MsrlError."""
    config = plan.config
    datasets = [dataset_type(plan.prefix(name)) for name in weights_by_name(config)]
    evaluated = config.data.eval and dataset_type(plan.prefix(config.data.eval))
    if config.data.blend:
        check_templates(datasets)
        mixed = tuple(open_rows(config, dataset) for dataset in datasets)
        return MixedRows(mixed), open_rows(config, evaluated) if evaluated else None
    [dataset] = datasets
    trained, held_out = split_rows(config, dataset)
    train = open_rows(config, dataset, trained)
    if evaluated:
        return train, open_rows(config, evaluated)
    return train, open_rows(config, dataset, held_out) if held_out else None


def check_lengths(config: Config, prefix: str, rows: SftRows, num_added: int = 0) -> None:
    """Raise MsrlError if a row does not fit into a micro-batch.

    The training adds `num_added` tokens to each row.
    """
    longest = rows.longest + num_added
    added = f", {num_added} of which are added" if num_added else ""
    check_longest_row(config, prefix, longest, f"up to {longest} tokens{added}")
    check_patches(config, prefix, lambda: rows.most_patches)
