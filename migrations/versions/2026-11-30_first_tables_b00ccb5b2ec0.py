"""first tables."""

import sqlalchemy as sa
from alembic import op

revision = 'b00ccb5b2ec0'
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.create_table('conversations',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('created_ns', sa.BigInteger(), nullable=False),
    sa.Column('updated_ns', sa.BigInteger(), nullable=False),
    sa.Column('title', sa.Text(), nullable=False),
    sa.Column('system_prompt', sa.Text(), nullable=False),
    sa.Column('params', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_conversations'))
    )
    with op.batch_alter_table('conversations', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_conversations_updated_ns'), ['updated_ns'], unique=False)

    op.create_table('sessions',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('started_ns', sa.BigInteger(), nullable=False),
    sa.Column('ended_ns', sa.BigInteger(), nullable=True),
    sa.Column('ended_how', sa.Text(), nullable=True),
    sa.Column('model_name', sa.Text(), nullable=False),
    sa.Column('config', sa.Text(), nullable=True),
    sa.Column('version', sa.Text(), nullable=False),
    sa.Column('records_text', sa.Boolean(), nullable=False),
    sa.Column('first_step', sa.BigInteger(), nullable=False),
    sa.Column('last_step', sa.BigInteger(), nullable=False),
    sa.Column('num_lost_steps', sa.BigInteger(), nullable=False),
    sa.Column('note', sa.Text(), nullable=False),
    sa.Column('is_starred', sa.Boolean(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_sessions'))
    )
    with op.batch_alter_table('sessions', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_sessions_started_ns'), ['started_ns'], unique=False)

    op.create_table('bookmarks',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('note', sa.Text(), nullable=False),
    sa.Column('created_ns', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], name=op.f('fk_bookmarks_session_id_sessions'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_bookmarks'))
    )
    with op.batch_alter_table('bookmarks', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_bookmarks_session_id_step'), ['session_id', 'step'], unique=False)

    op.create_table('chunks',
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('first_step', sa.BigInteger(), nullable=False),
    sa.Column('num_steps', sa.BigInteger(), nullable=False),
    sa.Column('first_ns', sa.BigInteger(), nullable=False),
    sa.Column('last_ns', sa.BigInteger(), nullable=False),
    sa.Column('records', sa.LargeBinary(), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], name=op.f('fk_chunks_session_id_sessions'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('session_id', 'first_step', name=op.f('pk_chunks'))
    )
    op.create_table('keyframes',
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('is_base', sa.Boolean(), nullable=False),
    sa.Column('state', sa.LargeBinary(), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], name=op.f('fk_keyframes_session_id_sessions'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('session_id', 'step', name=op.f('pk_keyframes'))
    )
    op.create_table('messages',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('conversation_id', sa.Text(), nullable=False),
    sa.Column('position', sa.BigInteger(), nullable=False),
    sa.Column('variant', sa.BigInteger(), nullable=False),
    sa.Column('role', sa.Text(), nullable=False),
    sa.Column('text', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('error', sa.Text(), nullable=True),
    sa.Column('created_ns', sa.BigInteger(), nullable=False),
    sa.Column('request_id', sa.Text(), nullable=True),
    sa.Column('session_id', sa.Text(), nullable=True),
    sa.Column('stats', sa.Text(), nullable=False),
    sa.Column('is_left_out', sa.Boolean(), nullable=False),
    sa.Column('is_chosen', sa.Boolean(), nullable=False),
    sa.ForeignKeyConstraint(['conversation_id'], ['conversations.id'], name=op.f('fk_messages_conversation_id_conversations'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_messages'))
    )
    with op.batch_alter_table('messages', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_messages_conversation_id_position_variant'), ['conversation_id', 'position', 'variant'], unique=True)

    op.create_table('metrics',
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('second', sa.BigInteger(), nullable=False),
    sa.Column('last_step', sa.BigInteger(), nullable=False),
    sa.Column('num_steps', sa.BigInteger(), nullable=False),
    sa.Column('step_ns', sa.BigInteger(), nullable=False),
    sa.Column('max_step_ns', sa.BigInteger(), nullable=False),
    sa.Column('num_prefill_tokens', sa.BigInteger(), nullable=False),
    sa.Column('num_decode_tokens', sa.BigInteger(), nullable=False),
    sa.Column('num_hit_tokens', sa.BigInteger(), nullable=False),
    sa.Column('num_lookup_tokens', sa.BigInteger(), nullable=False),
    sa.Column('num_arrived', sa.BigInteger(), nullable=False),
    sa.Column('num_finished', sa.BigInteger(), nullable=False),
    sa.Column('num_preemptions', sa.BigInteger(), nullable=False),
    sa.Column('num_evictions', sa.BigInteger(), nullable=False),
    sa.Column('num_running', sa.BigInteger(), nullable=False),
    sa.Column('num_waiting', sa.BigInteger(), nullable=False),
    sa.Column('num_free', sa.BigInteger(), nullable=False),
    sa.Column('num_cached', sa.BigInteger(), nullable=False),
    sa.Column('num_used', sa.BigInteger(), nullable=False),
    sa.Column('ttft_ns', sa.BigInteger(), nullable=False),
    sa.Column('num_ttft', sa.BigInteger(), nullable=False),
    sa.Column('max_ttft_ns', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], name=op.f('fk_metrics_session_id_sessions'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('session_id', 'second', name=op.f('pk_metrics'))
    )
    op.create_table('request_events',
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('seq', sa.BigInteger(), nullable=False),
    sa.Column('request_id', sa.Text(), nullable=False),
    sa.Column('choice_index', sa.BigInteger(), nullable=False),
    sa.Column('seq_id', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('t_ns', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('detail', sa.Text(), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], name=op.f('fk_request_events_session_id_sessions'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('session_id', 'seq', name=op.f('pk_request_events'))
    )
    with op.batch_alter_table('request_events', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_request_events_request_id'), ['request_id'], unique=False)
        batch_op.create_index(batch_op.f('ix_request_events_session_id_step'), ['session_id', 'step'], unique=False)

    op.create_table('requests',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('session_id', sa.Text(), nullable=False),
    sa.Column('conversation_id', sa.Text(), nullable=True),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('arrived_ns', sa.BigInteger(), nullable=False),
    sa.Column('admitted_ns', sa.BigInteger(), nullable=True),
    sa.Column('first_token_ns', sa.BigInteger(), nullable=True),
    sa.Column('ended_ns', sa.BigInteger(), nullable=True),
    sa.Column('arrived_step', sa.BigInteger(), nullable=False),
    sa.Column('admitted_step', sa.BigInteger(), nullable=True),
    sa.Column('first_token_step', sa.BigInteger(), nullable=True),
    sa.Column('ended_step', sa.BigInteger(), nullable=True),
    sa.Column('num_choices', sa.BigInteger(), nullable=False),
    sa.Column('max_tokens', sa.BigInteger(), nullable=False),
    sa.Column('num_prompt_tokens', sa.BigInteger(), nullable=False),
    sa.Column('num_cached_tokens', sa.BigInteger(), nullable=False),
    sa.Column('num_output_tokens', sa.BigInteger(), nullable=False),
    sa.Column('num_preemptions', sa.BigInteger(), nullable=False),
    sa.Column('num_recomputed_tokens', sa.BigInteger(), nullable=False),
    sa.Column('finish_reason', sa.Text(), nullable=True),
    sa.Column('error_code', sa.Text(), nullable=True),
    sa.Column('params', sa.Text(), nullable=False),
    sa.ForeignKeyConstraint(['session_id'], ['sessions.id'], name=op.f('fk_requests_session_id_sessions'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_requests'))
    )
    with op.batch_alter_table('requests', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_requests_arrived_ns_id'), ['arrived_ns', 'id'], unique=False)
        batch_op.create_index(batch_op.f('ix_requests_session_id_arrived_step'), ['session_id', 'arrived_step'], unique=False)
        batch_op.create_index(batch_op.f('ix_requests_status'), ['status'], unique=False)

    op.create_table('request_texts',
    sa.Column('request_id', sa.Text(), nullable=False),
    sa.Column('prompt', sa.Text(), nullable=False),
    sa.Column('outputs', sa.Text(), nullable=True),
    sa.ForeignKeyConstraint(['request_id'], ['requests.id'], name=op.f('fk_request_texts_request_id_requests'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('request_id', name=op.f('pk_request_texts'))
    )


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_table('request_texts')
    with op.batch_alter_table('requests', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_requests_status'))
        batch_op.drop_index(batch_op.f('ix_requests_session_id_arrived_step'))
        batch_op.drop_index(batch_op.f('ix_requests_arrived_ns_id'))

    op.drop_table('requests')
    with op.batch_alter_table('request_events', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_request_events_session_id_step'))
        batch_op.drop_index(batch_op.f('ix_request_events_request_id'))

    op.drop_table('request_events')
    op.drop_table('metrics')
    with op.batch_alter_table('messages', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_messages_conversation_id_position_variant'))

    op.drop_table('messages')
    op.drop_table('keyframes')
    op.drop_table('chunks')
    with op.batch_alter_table('bookmarks', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_bookmarks_session_id_step'))

    op.drop_table('bookmarks')
    with op.batch_alter_table('sessions', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_sessions_started_ns'))

    op.drop_table('sessions')
    with op.batch_alter_table('conversations', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_conversations_updated_ns'))

    op.drop_table('conversations')
