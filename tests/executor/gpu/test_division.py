"""Which rows the device draws for."""

import numpy as np
import pytest
import torch

from services.executor.gpu.division import divide
from services.executor.gpu.parcel import ALIGNMENT, Parcel
from shared.messages import Score
from shared.sampling import DrawParams
from tests.executor.plans import report, row, sample

CUTS = DrawParams(temperature=0.5, top_k=900, top_p=0.9, min_p=0.1)
PLAIN = row((1, 2), 0, (0,), 1, [sample(1), sample(2, CUTS, seed=-1, index=3)])


def division(*rows, num_logits=None, most_draws=10):
    return divide(rows, num_logits or len(rows), 512, most_draws)


def test_temperature_and_cuts_are_the_devices():
    made = division(PLAIN, row((1,), 4, (1,), 5))
    assert made.places == {1: 0, 2: 1, 5: 2}
    assert made.host_rows == ()
    assert made.draws["rows"].tolist() == [0, 0, 1]
    assert made.draws["draw_positions"].tolist() == [2, 2, 5]
    assert made.draws["top_ks"].tolist() == [0, 512, 0]
    assert made.draws["seeds"].tolist() == [0, -1, 0]
    assert made.draws["indexes"].tolist() == [0, 3, 0]


@pytest.mark.parametrize(
    "asking",
    [
        sample(7, DrawParams(frequency_penalty=0.1), history=(1,), num_prompt=1),
        sample(7, DrawParams(logit_bias={3: 1.0})),
        sample(7, banned_ids=(4,)),
        sample(7, num_top=0),
        report(7),
    ],
    ids=["penalty", "bias", "ban", "log-probability", "beam"],
)
def test_what_only_the_cpus_sampler_knows_takes_its_row_there_and_no_other(asking):
    other = row((1,), 0, (3,), 7, [asking])
    made = division(PLAIN, other, row((1,), 4, (1,), 5))
    assert made.host_rows == (other,)
    assert made.host_logits.tolist() == [1]
    assert made.places == {1: 0, 2: 1, 5: 2}
    assert made.draws["rows"].tolist() == [0, 0, 2]


def test_a_row_with_a_score_is_the_cpus_and_rows_without_samples_have_no_logits():
    silent = row((1, 2), 0, (4,), 8, [])
    scored = row((1, 2, 3), 0, (5,), 9, score=Score(0, (2, 3), 1))
    made = division(silent, PLAIN, scored, num_logits=4)
    assert made.host_rows == (scored,)
    assert made.host_logits.tolist() == [1, 2, 3]
    assert made.draws["rows"].tolist() == [0, 0]


def test_more_draws_than_there_is_room_for_are_the_cpus():
    made = division(PLAIN, most_draws=1)
    assert (made.places, made.draws, made.host_rows) == ({}, {}, (PLAIN,))


def test_a_parcel_holds_arrays_of_all_kinds_aligned():
    arrays = {
        "a": np.arange(3, dtype=np.int32),
        "none": np.zeros((0, 8), np.int32),
        "b": np.arange(6, dtype=np.int64).reshape(2, 3),
        "c": np.array([0.1, 0.9]),
    }
    parcel = Parcel(arrays)
    memory = torch.zeros(parcel.num_bytes, dtype=torch.uint8)
    parcel.write(memory)
    read = parcel.read(memory)
    assert parcel.num_bytes == 3 * ALIGNMENT
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name].numpy(), array)
        assert read[name].data_ptr() % ALIGNMENT == memory.data_ptr() % ALIGNMENT or not array.size
