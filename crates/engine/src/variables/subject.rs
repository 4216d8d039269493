//! What variables are about, a request or a session, and how it gets their values.
//!
//! A [`Subject`] lends what a protocol knows (its connection, its table of variables, its log) and keeps two things for
//! the engine: [`Values`], what variables were given or worked out to be, and an [`Evaluation`], what one variable has
//! to know of those that are being worked out for it. Everything else follows from these.
//!
//! Evaluation is bounded in depth and in cost: no configuration and no client makes it take long.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_runtime::SocketAddress;

use super::regex::{CAPTURES_MAX, Captures, Match};
use super::{Found, HasVariables, Source, VariableId, VariableTable};
use crate::connections::ConnectionInfo;
use crate::log::ErrorLog;

/// How deep variables may refer to each other before they have no value.
const VARIABLE_DEPTH_MAX: u32 = 100;

/// What values of variables that only other values need may cost one subject, in bytes: a volatile `map` that asks for
/// another one twice, which asks for a third one twice, and so on, doubles the work with every line of a configuration.
/// What a client sends in its head may be doubled in the same way. So much takes some ten milliseconds at most.
const NESTED_COST_MAX: usize = 4 << 20;

/// How often such values may be as long as the body that is kept in memory, beside that: `client_body_buffer_size` says
/// how long `$request_body` may be, and whoever wants it long wants to look at it, too.
const NESTED_BODIES_MAX: usize = 4;

/// What working out such a value costs, beside its length: some ten thousand are some milliseconds.
const EVALUATION_COST: usize = 384;

/// What copying one that is kept costs, beside its length.
const COPY_COST: usize = 64;

/// In place of the depth: it was reached, and the way back is not at its end yet.
const CYCLE: u32 = u32::MAX;

/// What variables are about: a request of http, a session of stream.
pub trait Subject: Sized + 'static {
    /// The block that is read for it.
    type Block: HasVariables<Self>;

    /// The connection that it came on.
    fn connection(&self) -> &ConnectionInfo;

    /// The client's address: that of the connection, unless somebody knows better.
    fn remote(&self) -> &SocketAddress;

    /// Our address, as the client has it.
    fn local(&self) -> Option<&SocketAddress> {
        None
    }

    /// Whether somebody knows better than the connection where it comes from.
    fn is_remote_set(&self) -> bool;

    /// From now on, and in its log lines, it comes from this address. That is found out once: another one later changes
    /// nothing.
    fn set_remote(&self, address: SocketAddress);

    /// The note of this type, which its parts share: an empty one at first.
    fn shared_note<T: Default + 'static>(&self) -> Rc<T>;

    /// Drops `value` when it is over. A later value of the same type replaces the earlier one.
    fn hold<T: 'static>(&mut self, value: T);

    /// The variables of its configuration.
    fn variables(&self) -> &VariableTable<Self>;

    /// What is kept for them.
    fn values(&self) -> &Values;

    /// Where their evaluation stands.
    fn evaluation(&self) -> &Evaluation;

    /// How long the body is that is kept in memory, in bytes: the longest value that a configuration may ask for.
    fn body_bytes(&self) -> usize {
        0
    }

    /// Writes a line to the error log that is in force for it, if it takes the level.
    fn log(&self, level: Level, message: fmt::Arguments<'_>);

    /// Where messages go that are about no subject.
    fn error_log(&self) -> &Arc<ErrorLog>;

    /// Takes over the groups of a match in `text`: for `$1` to `$9`, and for the variables of named groups.
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

    /// From now on `$1` to `$9` are empty.
    fn forget_match(&self) {
        if let Some(captured) = &mut *self.evaluation().captured.borrow_mut() {
            captured.groups.clear();
        }
    }

    /// Lets `f` see the text of a group of the last regular expression that matched.
    fn with_capture(&self, number: usize, f: impl FnOnce(&[u8])) {
        let captured = self.evaluation().captured.borrow();
        if number < CAPTURES_MAX {
            let text = captured.as_ref().and_then(|captured| captured.groups.text(&captured.text, number));
            f(text.unwrap_or_default());
        }
    }

    /// Gives a stored variable its value.
    fn store_variable(&self, id: VariableId, value: &[u8]) {
        store(self, id, Stored::Value(Value::new(value)));
    }

    /// Gives a variable the value that `set` says, in the way of whoever defines it.
    fn assign_variable(&mut self, id: VariableId, value: &[u8]) {
        match self.variables().assign(id) {
            Some(assign) => assign(self, value),
            None => self.store_variable(id, value),
        }
    }

    /// Appends the value of a variable to `out`; `false` when it has none.
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
            // Usually nobody waits for it but the configuration's own text: then nothing is counted.
            Source::Evaluated { value, argument } if depth == 0 => {
                evaluation.depth.set(1);
                let found = value(self, argument, out);
                evaluation.depth.set(0);
                found
            }
            // Deeper by one, so that it is one of the circle that is told of.
            Source::Evaluated { value, argument } => evaluate(self, id, VARIABLE_DEPTH_MAX + 1, || {
                let start = out.len();
                value(self, argument, out) && spend(self, id, out.len() - start)
            }),
            Source::Defined { definition, is_volatile } => {
                let start = out.len();
                let found = evaluate(self, id, VARIABLE_DEPTH_MAX, || definition.append(self, out));
                if costs_too_much(self, evaluation.nested_cost.get()) {
                    // Not to be kept: what there is of it may be long, and is not all.
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

    /// Appends the value of the variable that has this name, in lower case; `false` when it has none or there is no
    /// such variable.
    fn append_named_variable(&self, name: &[u8], out: &mut Vec<u8>) -> bool {
        match self.variables().find(name) {
            Some(Found::Mentioned(id)) => self.append_variable(id, out),
            // It may refer to others, which are counted.
            Some(Found::Defined(Source::Evaluated { value, argument })) => value(self, &argument, out),
            Some(Found::Defined(_)) | None => false,
        }
    }
}

/// What a subject keeps for its variables. A part of it, as a subrequest is, shares them.
#[derive(Default)]
pub struct Values(RefCell<Vec<Stored>>);

/// What is kept for one variable.
#[derive(Default)]
enum Stored {
    /// Nothing: it is worked out.
    #[default]
    Nothing,
    /// It was worked out, and there is no value.
    Missing,
    Value(Value),
}

/// A value, with memory of its own if it is not short: most of those that a configuration chooses among are.
enum Value {
    Short { length: u8, bytes: [u8; SHORT_MAX] },
    Long(Box<[u8]>),
}

/// As much as has room where a long one has its address and its length.
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
    /// Forgets everything, keeping the memory for the next subject.
    pub fn clear(&mut self) {
        self.0.get_mut().clear();
    }

    /// Keeps memory for no more than there are. Says whether there are none.
    pub fn shrink(&mut self) -> bool {
        let stored = self.0.get_mut();
        let length = stored.iter().rposition(|value| !matches!(value, Stored::Nothing)).map_or(0, |last| last + 1);
        stored.truncate(length);
        stored.shrink_to_fit();
        stored.is_empty()
    }
}

/// Where the evaluation of a subject's variables stands, and what the last regular expression found.
#[derive(Default)]
pub struct Evaluation {
    /// There from the first expression on that matches.
    captured: RefCell<Option<Box<Captured>>>,
    depth: Cell<u32>,
    nested_cost: Cell<usize>,
    is_too_costly: Cell<bool>,
    /// Memory for texts that are looked at and forgotten.
    buffers: RefCell<Vec<Vec<u8>>>,
}

/// How many of them are kept, and how long they may be: for a variable that asks for another one.
const BUFFERS_MAX: usize = 2;
const BUFFER_BYTES: usize = 64;
const BUFFER_BYTES_MAX: usize = 1024;

/// The last regular expression that matched: where its groups stand, and in what.
#[derive(Clone, Default)]
struct Captured {
    groups: Captures,
    text: Vec<u8>,
}

impl Evaluation {
    /// Begins anew for another subject, keeping the memory.
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

    /// Whether it is as a new one: no expression has matched, and nothing was worked out for something else.
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

    /// The captures of another subject, for one that goes on where that stands.
    pub fn copy_captures(&self) -> Evaluation {
        Evaluation { captured: RefCell::new(self.captured.borrow().clone()), ..Evaluation::default() }
    }

    /// Whether variables have become too costly, so that the subject has to be refused: said once.
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

/// Bounds how deep variables refer to each other. Once they went too deep, no variable has a value until the first of
/// them has got its own: a circle ends after that many steps, and with little text, even where it branches.
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

/// Counts what the value of a variable costs that another one needs; `false` when that is too much, and then no
/// variable has a value until the first of them has got its own.
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

/// Whether so much is too much for values that only other values need.
fn costs_too_much<S: Subject>(subject: &S, cost: usize) -> bool {
    cost > NESTED_COST_MAX && (cost - NESTED_COST_MAX) / NESTED_BODIES_MAX >= subject.body_bytes()
}
