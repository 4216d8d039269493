//! Variables of requests: the engine's, for the subject that a request is.

pub use gale_engine::variables::{VariableId, is_name_byte, regex, template};

use crate::request::Request;

/// A variable that a module defines.
pub type Variable = gale_engine::variables::Variable<Request>;

/// The variables of an http block.
pub type VariableTable = gale_engine::variables::VariableTable<Request>;
