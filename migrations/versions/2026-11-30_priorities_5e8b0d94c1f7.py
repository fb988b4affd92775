"""priorities."""

import sqlalchemy as sa
from alembic import op

revision = '5e8b0d94c1f7'
down_revision = '9c2e51f7a6d4'
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision; requests of before it had no priority, which is 0."""
    op.add_column('requests', sa.Column('priority', sa.BigInteger(), server_default=sa.text('0'), nullable=False))


def downgrade() -> None:
    """Go back to the revision before."""
    # Not as a batch: that makes the table anew, and with the old one all that refers to it would go.
    op.drop_column('requests', 'priority')
