//! Which entry goes first when room is needed.

pub(crate) mod fifo;
