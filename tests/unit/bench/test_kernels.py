import pytest

from bench.kernels import Shape, make_shapes
from engine.kernels.cpu.library import NativeModel
from engine.model.check import open_model
from tests.support.kernels import load_native, make_sizes
from tests.support.models import VARIANTS, make_reference, write_folder

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path_factory.mktemp("model"))
    return load_native(open_model(folder), make_sizes(num_blocks=8, block_size=8, num_positions=64))


def test_each_number_of_rows_gives_a_decode_and_all_but_one_a_prefill() -> None:
    assert make_shapes([1, 8], 400) == [
        Shape("decode 1 x 1 at 400", 1, 1, 400),
        Shape("decode 8 x 1 at 400", 8, 1, 400),
        Shape("prefill 1 x 8", 1, 8, 0),
    ]


@pytest.mark.parametrize(("shape", "fits"), [
    (Shape("", 4, 1, 15), True), (Shape("", 4, 1, 16), False), (Shape("", 1, 64, 0), True),
    (Shape("", 1, 65, 0), False),
])  # fmt: skip
def test_a_shape_fits_if_pool_and_positions_suffice(model: NativeModel, shape: Shape, *, fits: bool) -> None:
    assert shape.fits(model) == fits


@pytest.mark.parametrize("shape", [Shape("", 4, 1, 15), Shape("", 1, 30, 0)])
def test_a_shape_that_fits_can_be_computed(model: NativeModel, shape: Shape) -> None:
    batch = shape.make_batch(model)
    assert len(set(batch.tables)) == len(batch.tables)
    token_ids = model.step(batch).token_ids
    assert len(token_ids) == shape.num_sequences
