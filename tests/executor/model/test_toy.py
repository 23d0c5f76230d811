import numpy as np
import pytest
import torch

from services.executor.batch import flatten, logit_tokens, pack
from services.executor.model.toy import ENDING, EOS, PRINTABLE, UNLIKELY, VOCAB_SIZE, ToyModel
from tests.executor.plain_toy import PlainPool, toy_logits
from tests.executor.plans import row

BLOCK_SIZE = 4


def forward(model, pool, *rows):
    """Logits of each row's last token, [len(rows), VOCAB_SIZE]."""
    flat = flatten(rows, BLOCK_SIZE)
    batch = pack(flat, flat.token_ids, logit_tokens(rows, flat))
    return model.forward(pool, batch).numpy()


@pytest.fixture
def model():
    return ToyModel()


@pytest.fixture
def pool(model):
    return model.allocate_pool(8, BLOCK_SIZE)


def test_it_equals_its_plain_form(model, pool):
    logits = forward(
        model, pool, row((65, 66, 67, 68, 69), 0, (3, 1)), row((70,), 0, (5,), sequence_id=2)
    )
    assert (logits[0] == toy_logits([(65, 0), (66, 1), (67, 2), (68, 3), (69, 4)])).all()
    assert (logits[1] == toy_logits([(70, 0)])).all()


def test_it_is_the_same_in_chunks_in_other_blocks_and_in_company(model, pool):
    whole = forward(model, pool, row(range(65, 75), 0, (0, 1, 2)))[0]
    forward(model, pool, row(range(65, 68), 0, (7, 5, 6)))
    forward(model, pool, row(range(68, 74), 3, (7, 5, 6)))
    chunked = forward(model, pool, row((99,), 0, (3,), sequence_id=2), row((74,), 9, (7, 5, 6)))[1]
    assert (whole == chunked).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool[1, 0, 0].add_(1),  # another token
        lambda pool: pool[1, 0, 1].add_(1),  # a stale position
        lambda pool: pool[1].copy_(pool[0].clone()),  # another block
        lambda pool: pool[1].fill_(-1),  # never written
    ],
)
def test_one_wrong_place_changes_every_likely_logit(model, pool, spoil):
    tokens = tuple(range(65, 75))
    forward(model, pool, row(tokens[:9], 0, (0, 1, 2)))
    good = forward(model, pool, row(tokens[9:], 9, (0, 1, 2)))[0]
    with torch.inference_mode():
        spoil(pool)
    bad = forward(model, pool, row(tokens[9:], 9, (0, 1, 2)))[0]
    likely = slice(PRINTABLE.start, PRINTABLE.stop)
    assert (good[likely] == bad[likely]).sum() <= 1


def test_the_order_of_the_table_matters(model, pool):
    pool.fill_(0)  # the same stored everywhere: only the place in the table tells
    pool[0, :, 0] = 65
    pool[1, :, 0] = 66
    ahead = forward(model, pool, row((67,), 8, (0, 1, 2)))[0]
    back = forward(model, pool, row((67,), 8, (1, 0, 2)))[0]
    assert (ahead != back).any()


def test_what_lies_beyond_the_last_token_does_not_matter(model, pool):
    before = forward(model, pool, row((65, 66), 0, (0,)))[0]
    pool[0, 2:] = 12345
    assert (forward(model, pool, row((66,), 1, (0,)))[0] == before).all()


def test_no_two_logits_are_equal_and_each_is_exact(model, pool):
    for seed in range(50):
        logits = forward(model, pool, row((seed, seed + 1), 0, (0,)))[0]
        likely = logits[PRINTABLE.start : PRINTABLE.stop]
        assert len(set(logits.tolist())) == VOCAB_SIZE
        assert (logits * 2**20 == np.round(logits * 2**20)).all()
        assert 0 <= likely.min() < likely.max() < 8


def test_it_writes_printable_text_that_ends_now_and_then(model):
    pool = model.allocate_pool(512, BLOCK_SIZE)
    table, token, best = tuple(range(512)), 65, []
    for position in range(2000):
        token = int(forward(model, pool, row((token,), position, table))[0].argmax())
        best.append(token)
    assert set(best) <= {*PRINTABLE, EOS}
    assert 3 <= best.count(EOS) <= 40  # 1 in 128
    assert len(set(best)) > 60


def test_the_end_is_either_due_or_out_of_reach(model, pool):
    ends = {float(forward(model, pool, row((a, b), 0, (0,)))[0][EOS])
            for a in range(32) for b in range(32)}  # fmt: skip
    assert ends == {ENDING, UNLIKELY - EOS / 128}


def test_no_wanted_logits_are_no_rows(model, pool):
    flat = flatten([row((65,), 0, (0,))], BLOCK_SIZE)
    batch = pack(flat, flat.token_ids, np.zeros(0, np.int64))
    assert model.forward(pool, batch).shape == (0, VOCAB_SIZE)
    assert pool[0, 0].tolist() == [65, 0]


def test_blocks_are_copied_whole_within_a_pool_and_between_pools(model, pool):
    other = model.allocate_pool(2, BLOCK_SIZE)
    forward(model, pool, row((65, 66, 67, 68), 0, (3,)))
    model.copy_blocks(pool, pool, torch.tensor([[3, 4], [3, 5]]))
    model.copy_blocks(pool, other, torch.tensor([[4, 1]]))
    assert pool[4].tolist() == pool[5].tolist() == other[1].tolist() == pool[3].tolist()
    assert other[0].unique().tolist() == [-1]


def test_the_plain_pool_reads_what_was_never_written_as_the_toy_does(model, pool):
    pool[0, 0] = torch.tensor([65, 0])
    plain = PlainPool(BLOCK_SIZE)
    plain.write((0,), 0, 65)
    plain.write((0,), 2, 67)
    logits = forward(model, pool, row((67,), 2, (0,)))[0]
    assert (logits == toy_logits(plain.context((0,), 3))).all()
