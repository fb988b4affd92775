"""most at once."""

import sqlalchemy as sa
from alembic import op

revision = '4d7a19c0e3f2'
down_revision = 'b00ccb5b2ec0'
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision; of the seconds before it the last numbers are all that is known."""
    for name in ('running', 'waiting'):
        op.add_column('metrics', sa.Column(f'max_{name}', sa.BigInteger(), nullable=False, server_default='0'))
    op.execute('UPDATE metrics SET max_running = num_running, max_waiting = num_waiting')
    with op.batch_alter_table('metrics', schema=None) as batch_op:
        for name in ('running', 'waiting'):
            batch_op.alter_column(f'max_{name}', server_default=None)


def downgrade() -> None:
    """Go back to the revision before."""
    with op.batch_alter_table('metrics', schema=None) as batch_op:
        batch_op.drop_column('max_waiting')
        batch_op.drop_column('max_running')
