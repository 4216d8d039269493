//! Bodies of the fuzz target `control_socket`, which see what is private; the program does not call it.

pub use crate::control::fuzzing::read_answer;
pub use crate::master::read_order;
