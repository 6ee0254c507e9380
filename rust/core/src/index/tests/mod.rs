//! Tests of the whole index: random operations against a naive model, crashes between any two stores, damaged bytes.

mod crashes;
mod damage;
mod directed;
mod harness;
mod model;
mod operations;
mod random;
