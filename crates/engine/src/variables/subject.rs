//! Subject of variables, a request or a session, and the evaluation of its variables.
//!
//! A [`Subject`] gives access to the protocol's data (connection, table of variables, log) and stores two objects for
//! the engine: [`Values`], the stored or cached values, and an [`Evaluation`], the state of evaluations in progress.
//! Everything else is derived from these.
//!
//! Evaluation is bounded in depth and cost, so that neither a configuration nor a client can make it slow.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_log::ErrorLog;
use gale_runtime::SocketAddress;

use super::regex::{CAPTURES_MAX, Captures, Match};
use super::{Found, HasVariables, Source, VariableId, VariableTable};
use crate::connections::ConnectionInfo;

/// Deepest nesting of variables; deeper ones have no value.
const VARIABLE_DEPTH_MAX: u32 = 100;

/// Most bytes that nested values may cost for one subject. Without it, a volatile `map` that uses another one twice,
/// which uses a third one twice, and so on, doubles the work with every line of the configuration, as can be done with
/// data in a client's request head. This amount takes at most some ten milliseconds.
const NESTED_COST_MAX: usize = 4 << 20;

/// Additional allowance for nested values, as a multiple of the body kept in memory: `client_body_buffer_size` sets the
/// length of `$request_body`, and a configuration that makes it long wants to use it.
const NESTED_BODIES_MAX: usize = 4;

/// Cost of evaluating a nested value, besides its length: some ten thousand take some milliseconds.
const EVALUATION_COST: usize = 384;

/// Cost of copying a cached value, besides its length.
const COPY_COST: usize = 64;

/// Replaces the depth once the limit was reached, until the outermost evaluation ends.
const CYCLE: u32 = u32::MAX;

/// Subject of variables: a request of http, a session of stream.
pub trait Subject: Sized + 'static {
    /// Type of block that its configuration is read from.
    type Block: HasVariables<Self>;

    /// Its connection.
    fn connection(&self) -> &ConnectionInfo;

    /// The client's address: that of the connection, unless it was replaced.
    fn remote(&self) -> &SocketAddress;

    /// The local address, as seen by the client.
    fn local(&self) -> Option<&SocketAddress> {
        None
    }

    /// `true` if the client's address was replaced.
    fn is_remote_set(&self) -> bool;

    /// Replaces the client's address, also for the log. Only the first call has an effect.
    fn set_remote(&self, address: SocketAddress);

    /// The note of this type, shared with its parts such as subrequests; empty at first.
    fn shared_note<T: Default + 'static>(&self) -> Rc<T>;

    /// Keeps `value` until the subject ends. A later value of the same type replaces it.
    fn hold<T: 'static>(&mut self, value: T);

    /// Variables of its configuration.
    fn variables(&self) -> &VariableTable<Self>;

    /// Stored and cached values.
    fn values(&self) -> &Values;

    /// State of evaluations.
    fn evaluation(&self) -> &Evaluation;

    /// Length of the body kept in memory, in bytes: the longest value that a configuration can use.
    fn body_bytes(&self) -> usize {
        0
    }

    /// Logs a line to its error log, if that accepts the level.
    fn log(&self, level: Level, message: fmt::Arguments<'_>);

    /// Error log for messages outside of subjects.
    fn error_log(&self) -> &Arc<ErrorLog>;

    /// Stores the groups of a match in `text`, for `$1` to `$9` and the variables of named groups.
    fn take_match(&self, matched: Match<'_>, text: &[u8]) {
        for &(group, variable) in matched.regex.variables() {
            self.store_variable(variable, matched.captures.text(text, group).unwrap_or_default());
        }
        let mut captured = self.evaluation().captured.borrow_mut();
        let captured = captured.get_or_insert_default();
        captured.groups = matched.captures;
        captured.text.clear();
        captured.text.extend_from_slice(text);
    }

    /// Clears `$1` to `$9`.
    fn forget_match(&self) {
        if let Some(captured) = &mut *self.evaluation().captured.borrow_mut() {
            captured.groups.clear();
        }
    }

    /// Calls `f` with the text of a group of the last match.
    fn with_capture(&self, number: usize, f: impl FnOnce(&[u8])) {
        let captured = self.evaluation().captured.borrow();
        if number < CAPTURES_MAX {
            let text = captured.as_ref().and_then(|captured| captured.groups.text(&captured.text, number));
            f(text.unwrap_or_default());
        }
    }

    /// Stores a variable's value.
    fn store_variable(&self, id: VariableId, value: &[u8]) {
        store(self, id, Stored::Value(Value::new(value)));
    }

    /// Assigns a variable as `set` does, with the assignment function of its definition, if any.
    fn assign_variable(&mut self, id: VariableId, value: &[u8]) {
        match self.variables().assign(id) {
            Some(assign) => assign(self, value),
            None => self.store_variable(id, value),
        }
    }

    /// Appends the value of a variable to `out`; `false` if it has none.
    fn append_variable(&self, id: VariableId, out: &mut Vec<u8>) -> bool {
        let evaluation = self.evaluation();
        let depth = evaluation.depth.get();
        if depth == CYCLE {
            return false;
        }
        match self.values().0.borrow().get(id.0 as usize) {
            Some(Stored::Value(value)) => {
                let value = value.bytes();
                if depth > 0 && !spend(self, id, COPY_COST + value.len()) {
                    return false;
                }
                out.extend_from_slice(value);
                return true;
            }
            Some(Stored::Missing) => return false,
            Some(Stored::Nothing) | None => {}
        }
        match self.variables().source(id) {
            // Usually not nested; then nothing is counted.
            Source::Evaluated { value, argument } if depth == 0 => {
                evaluation.depth.set(1);
                let found = value(self, argument, out);
                evaluation.depth.set(0);
                found
            }
            // Allowed one level deeper, so that the report names a variable of the cycle.
            Source::Evaluated { value, argument } => evaluate(self, id, VARIABLE_DEPTH_MAX + 1, || {
                let start = out.len();
                value(self, argument, out) && spend(self, id, out.len() - start)
            }),
            Source::Defined { definition, is_volatile } => {
                let start = out.len();
                let found = evaluate(self, id, VARIABLE_DEPTH_MAX, || definition.append(self, out));
                if costs_too_much(self, evaluation.nested_cost.get()) {
                    // Not cached: the value may be long and is incomplete.
                    out.truncate(start);
                    return false;
                }
                if !is_volatile {
                    store(self, id, if found { Stored::Value(Value::new(&out[start..])) } else { Stored::Missing });
                }
                found
            }
            Source::Stored | Source::Unknown => false,
        }
    }

    /// Appends the value of the variable of this name, in lower case; `false` if it has none or does not exist.
    fn append_named_variable(&self, name: &[u8], out: &mut Vec<u8>) -> bool {
        match self.variables().find(name) {
            Some(Found::Mentioned(id)) => self.append_variable(id, out),
            // It may use others, which are counted.
            Some(Found::Defined(Source::Evaluated { value, argument })) => value(self, &argument, out),
            Some(Found::Defined(_)) | None => false,
        }
    }
}

/// Values stored for a subject's variables; a subrequest shares them.
#[derive(Default)]
pub struct Values(RefCell<Vec<Stored>>);

/// Value stored for one variable.
#[derive(Default)]
enum Stored {
    /// Nothing is stored; the value is evaluated.
    #[default]
    Nothing,
    /// Evaluated, without a value.
    Missing,
    Value(Value),
}

/// A value, allocated only if it is long; most values that a configuration chooses from are short.
enum Value {
    Short { length: u8, bytes: [u8; SHORT_MAX] },
    Long(Box<[u8]>),
}

/// Longest short value: the size of a long one's address and length.
const SHORT_MAX: usize = 22;
const _: () = assert!(size_of::<Stored>() == 24);

impl Value {
    fn new(value: &[u8]) -> Value {
        let mut bytes = [0; SHORT_MAX];
        match bytes.get_mut(..value.len()) {
            Some(start) => {
                start.copy_from_slice(value);
                Value::Short { length: value.len() as u8, bytes }
            }
            None => Value::Long(value.into()),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Value::Short { length, bytes } => &bytes[..usize::from(*length)],
            Value::Long(bytes) => bytes,
        }
    }
}

impl Values {
    /// Removes all values, keeping the memory for the next subject.
    pub fn clear(&mut self) {
        self.0.get_mut().clear();
    }

    /// Frees unused memory. Returns `true` if there are no values.
    pub fn shrink(&mut self) -> bool {
        let stored = self.0.get_mut();
        let length = stored.iter().rposition(|value| !matches!(value, Stored::Nothing)).map_or(0, |last| last + 1);
        stored.truncate(length);
        stored.shrink_to_fit();
        stored.is_empty()
    }
}

/// State of evaluations, and the last match of a regular expression.
#[derive(Default)]
pub struct Evaluation {
    /// Created at the first match.
    captured: RefCell<Option<Box<Captured>>>,
    depth: Cell<u32>,
    nested_cost: Cell<usize>,
    is_too_costly: Cell<bool>,
    /// Reusable buffers for temporary texts.
    buffers: RefCell<Vec<Vec<u8>>>,
}

/// Number and size limits of these buffers; enough for a variable that uses another one.
const BUFFERS_MAX: usize = 2;
const BUFFER_BYTES: usize = 64;
const BUFFER_BYTES_MAX: usize = 1024;

/// The last match: its groups and the searched text.
#[derive(Clone, Default)]
struct Captured {
    groups: Captures,
    text: Vec<u8>,
}

impl Evaluation {
    /// Resets the state for another subject, keeping the memory.
    pub fn clear(&mut self) {
        if let Some(captured) = self.captured.get_mut() {
            captured.groups.clear();
            if captured.text.capacity() > BUFFER_BYTES_MAX {
                captured.text = Vec::new();
            }
        }
        self.depth.set(0);
        self.nested_cost.set(0);
        self.is_too_costly.set(false);
    }

    /// `true` if it is as new: no expression has matched, and no nested value was counted.
    pub fn is_at_rest(&self) -> bool {
        let Evaluation { captured, depth, nested_cost, is_too_costly, buffers: _ } = self;
        let has_matched = captured.borrow().as_ref().is_some_and(|captured| !captured.groups.is_empty());
        !has_matched && depth.get() == 0 && nested_cost.get() == 0 && !is_too_costly.get()
    }

    /// Lends an empty buffer.
    pub(super) fn with_buffer<T>(&self, f: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let kept = self.buffers.borrow_mut().pop();
        let mut buffer = kept.unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES));
        let result = f(&mut buffer);
        buffer.clear();
        let mut buffers = self.buffers.borrow_mut();
        if buffers.len() < BUFFERS_MAX && buffer.capacity() <= BUFFER_BYTES_MAX {
            buffers.push(buffer);
        }
        result
    }

    /// Copies the captures for a subject that continues this one.
    pub fn copy_captures(&self) -> Evaluation {
        Evaluation { captured: RefCell::new(self.captured.borrow().clone()), ..Evaluation::default() }
    }

    /// Returns `true` once if variables became too costly, so that the subject has to be refused.
    pub fn take_too_costly(&self) -> bool {
        self.is_too_costly.take()
    }
}

fn store<S: Subject>(subject: &S, id: VariableId, value: Stored) {
    let mut stored = subject.values().0.borrow_mut();
    if stored.len() <= id.0 as usize {
        stored.resize_with(subject.variables().len(), Stored::default);
    }
    stored[id.0 as usize] = value;
}

/// Bounds the nesting of variables. After exceeding it, no variable has a value until the outermost one has finished:
/// so a cycle ends after that many steps and with little text, even if it branches.
fn evaluate<S: Subject>(subject: &S, id: VariableId, depth_max: u32, value: impl FnOnce() -> bool) -> bool {
    let current = &subject.evaluation().depth;
    let depth = current.get();
    if depth >= depth_max {
        let name = BStr::new(subject.variables().name(id));
        subject.log(Level::Error, format_args!("cycle while evaluating variable \"{name}\""));
        current.set(CYCLE);
        return false;
    }
    if depth > 0 && !spend(subject, id, EVALUATION_COST) {
        return false;
    }
    current.set(depth + 1);
    let found = value();
    if depth == 0 || current.get() != CYCLE {
        current.set(depth);
    }
    found
}

/// Counts the cost of a nested value; `false` if it exceeds the limit, after which no variable has a value until the
/// outermost one has finished.
fn spend<S: Subject>(subject: &S, id: VariableId, cost: usize) -> bool {
    let evaluation = subject.evaluation();
    let before = evaluation.nested_cost.get();
    let after = before.saturating_add(cost);
    evaluation.nested_cost.set(after);
    if !costs_too_much(subject, after) {
        return true;
    }
    if !costs_too_much(subject, before) {
        let name = BStr::new(subject.variables().name(id));
        let message = "variables that refer to variables exceed the limit for one request";
        subject.log(Level::Error, format_args!("{message} while evaluating variable \"{name}\""));
        evaluation.is_too_costly.set(true);
    }
    evaluation.depth.set(CYCLE);
    false
}

/// `true` if this cost exceeds the limit for nested values.
fn costs_too_much<S: Subject>(subject: &S, cost: usize) -> bool {
    cost > NESTED_COST_MAX && (cost - NESTED_COST_MAX) / NESTED_BODIES_MAX >= subject.body_bytes()
}
