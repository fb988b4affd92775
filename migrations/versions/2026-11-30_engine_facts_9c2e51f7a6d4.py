"""engine facts."""

import sqlalchemy as sa
from alembic import op

revision = '9c2e51f7a6d4'
down_revision = '4d7a19c0e3f2'
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision; how the models of sessions before it were run is not known."""
    op.add_column('sessions', sa.Column('engine', sa.Text(), nullable=True))


def downgrade() -> None:
    """Go back to the revision before."""
    # Not as a batch: that makes the table anew, and with the old one all that refers to it would go.
    op.drop_column('sessions', 'engine')
