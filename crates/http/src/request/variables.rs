//! Variables of requests: the engine's, for the subject that a request is.

pub use gale_engine::variables::{VariableId, is_name_byte, regex};

use crate::request::Request;

/// A variable that a module defines.
pub type Variable = gale_engine::variables::Variable<Request>;

/// The variables of an http block.
pub type VariableTable = gale_engine::variables::VariableTable<Request>;

/// Texts with variables of requests.
pub mod template {
    pub use gale_engine::variables::template::{any_is_true, leads_upwards, refuse_path};

    use crate::request::Request;

    /// A compiled text.
    pub type Template = gale_engine::variables::template::Template<Request>;

    /// A size in bytes that may depend on the request.
    pub type SizeTemplate = gale_engine::variables::template::SizeTemplate<Request>;
}
