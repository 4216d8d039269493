//! The library's connection, of either side. What its states have in common is handled once.

use std::io;
use std::ops::Deref;

use gale_runtime::{Buffer, Lease, Output};
use rustls::CommonState;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, EncryptError, UnbufferedStatus, WriteTraffic};
use smallvec::SmallVec;

use super::failure::TlsFailure;
use super::stream::{BATCH_RECORDS, Record, Standing};

/// See the file's head.
pub(super) enum Library {
    /// Ours is the server's side.
    Server(UnbufferedServerConnection),
    /// Ours is the client's side.
    Client(UnbufferedClientConnection),
}

impl Deref for Library {
    type Target = CommonState;

    fn deref(&self) -> &CommonState {
        match self {
            Library::Server(library) => library,
            Library::Client(library) => library,
        }
    }
}

/// What one step of the session reads and writes.
pub(super) struct Step<'s> {
    /// What is decrypted, behind what the reader has taken.
    pub plain: &'s mut Buffer,
    pub outgoing: &'s mut Output,
    pub records: &'s mut SmallVec<[Record; BATCH_RECORDS]>,
    pub is_ended: &'s mut bool,
    /// Something of what was decrypted came before the end of the handshake.
    pub has_early: &'s mut bool,
}

/// What a step has done.
pub(super) struct Stepped {
    /// So much of what has come was used.
    pub discard: usize,
    /// What the session waits for; `None` if it goes on.
    pub standing: Option<Standing>,
    /// So much went to the reader.
    pub delivered: usize,
}

/// A step that failed, and how much of what has come the session is done with.
pub(super) type StepFailed = (usize, TlsFailure);

/// What the session is to write.
#[derive(Clone, Copy)]
pub(super) enum Writing<'p> {
    /// These bytes, encrypted.
    Plain(&'p [u8]),
    /// That nothing more comes.
    CloseNotify,
}

impl Library {
    /// Has the session look at what has come.
    pub fn step(
        &mut self,
        incoming: &mut [u8],
        step: Step<'_>,
        reader: &mut Option<(&mut Buffer, usize)>,
    ) -> Result<Stepped, StepFailed> {
        match self {
            Library::Server(library) => step.take(library.process_tls_records(incoming), reader, |state, plain| {
                let ConnectionState::ReadEarlyData(mut early) = state else { return Err(TlsFailure::unexpected()) };
                let mut discard = 0;
                while let Some(record) = early.next_record() {
                    let record = record.map_err(TlsFailure::of)?;
                    discard += record.discard;
                    plain.append(record.payload).map_err(TlsFailure::of_socket)?;
                }
                Ok(discard)
            }),
            Library::Client(library) => {
                step.take(library.process_tls_records(incoming), reader, |_, _| Err(TlsFailure::unexpected()))
            }
        }
    }

    /// Has the session look at what has come, on a thread where that may take long: the steps up to the one in which it
    /// signs, for a client says something before that. Says how much of what has come was used; what is to be sent goes
    /// to `encoded`. The steps behind these are quick ones.
    pub fn step_slowly(&mut self, incoming: &mut [u8], encoded: &mut Vec<u8>) -> Result<usize, StepFailed> {
        /// Whether the session may have more to do.
        fn step<Data>(
            status: UnbufferedStatus<'_, '_, Data>,
            encoded: &mut Vec<u8>,
        ) -> (usize, Result<bool, TlsFailure>) {
            let UnbufferedStatus { discard, state } = status;
            let goes_on = state.map_err(TlsFailure::of).map(|state| match state {
                ConnectionState::EncodeTlsData(data) => {
                    encode(data, encoded);
                    true
                }
                ConnectionState::TransmitTlsData(data) => {
                    data.done();
                    true
                }
                // It is there in the next step, too.
                _ => false,
            });
            (discard, goes_on)
        }
        let mut used = 0;
        loop {
            let (discard, goes_on) = match self {
                Library::Server(library) => step(library.process_tls_records(&mut incoming[used..]), encoded),
                Library::Client(library) => step(library.process_tls_records(&mut incoming[used..]), encoded),
            };
            used += discard;
            match goes_on {
                Ok(true) => {}
                Ok(false) => return Ok(used),
                Err(failure) => return Err((used, failure)),
            }
        }
    }

    /// What the session has to tell its peer after a failure; `None` if it has nothing to say.
    pub fn encode_alert(&mut self, incoming: &mut [u8], alert: &mut [u8]) -> Option<usize> {
        fn encode<Data>(status: UnbufferedStatus<'_, '_, Data>, alert: &mut [u8]) -> Option<usize> {
            let Ok(ConnectionState::EncodeTlsData(mut data)) = status.state else { return None };
            data.encode(alert).ok()
        }
        match self {
            Library::Server(library) => encode(library.process_tls_records(incoming), alert),
            Library::Client(library) => encode(library.process_tls_records(incoming), alert),
        }
    }

    /// Has the session, which has looked at all that has come, write something of about this size. Also says how much
    /// of what has come was used.
    pub fn write(&mut self, incoming: &mut [u8], size: usize, writing: Writing<'_>) -> io::Result<(usize, Lease)> {
        match self {
            Library::Server(library) => write(library.process_tls_records(incoming), size, writing),
            Library::Client(library) => write(library.process_tls_records(incoming), size, writing),
        }
    }
}

fn write<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    size: usize,
    writing: Writing<'_>,
) -> io::Result<(usize, Lease)> {
    let UnbufferedStatus { discard, state } = status;
    let Ok(ConnectionState::WriteTraffic(mut traffic)) = state else {
        return Err(TlsFailure::unexpected().into());
    };
    let encrypt = |traffic: &mut WriteTraffic<'_, Data>, into: &mut [u8]| match writing {
        Writing::Plain(plain) => traffic.encrypt(plain, into),
        Writing::CloseNotify => traffic.queue_close_notify(into),
    };
    let mut record = Lease::new(size)?;
    let count = match encrypt(&mut traffic, &mut record) {
        // An answer to a change of keys goes first.
        Err(EncryptError::InsufficientSize(error)) => {
            record = Lease::new(error.required_size)?;
            encrypt(&mut traffic, &mut record)
        }
        result => result,
    };
    let count = count.map_err(|_| TlsFailure::Exhausted)?;
    record.truncate(count);
    Ok((discard, record))
}

/// What is to be sent, behind what `encoded` has already.
fn encode<Data>(mut data: EncodeTlsData<'_, Data>, encoded: &mut Vec<u8>) {
    let begin = encoded.len();
    loop {
        match data.encode(&mut encoded[begin..]) {
            Ok(count) => return encoded.truncate(begin + count),
            Err(EncodeError::InsufficientSize(error)) => encoded.resize(begin + error.required_size, 0),
            Err(EncodeError::AlreadyEncoded) => return,
        }
    }
}

impl Step<'_> {
    fn take<'c, 'i, Data>(
        self,
        status: UnbufferedStatus<'c, 'i, Data>,
        reader: &mut Option<(&mut Buffer, usize)>,
        of_one_side: impl FnOnce(ConnectionState<'c, 'i, Data>, &mut Buffer) -> Result<usize, TlsFailure>,
    ) -> Result<Stepped, StepFailed> {
        let UnbufferedStatus { mut discard, state } = status;
        let state = state.map_err(|error| (discard, TlsFailure::of(error)))?;
        let failed = |failure| (0, failure);
        let mut delivered = 0;
        let standing = match state {
            ConnectionState::EncodeTlsData(data) => {
                let mut encoded = Vec::new();
                encode(data, &mut encoded);
                self.outgoing.append(&encoded).map_err(TlsFailure::of_socket).map_err(failed)?;
                self.records.push(Record { left: encoded.len() as u32, plain: 0 });
                None
            }
            ConnectionState::TransmitTlsData(data) => {
                data.done();
                None
            }
            ConnectionState::ReadTraffic(mut traffic) => {
                while let Some(record) = traffic.next_record() {
                    let record = record.map_err(TlsFailure::of).map_err(failed)?;
                    discard += record.discard;
                    let mut payload = record.payload;
                    if let Some((into, max)) = reader.take() {
                        let (now, later) = payload.split_at(payload.len().min(max));
                        into.append(now).map_err(TlsFailure::of_socket).map_err(failed)?;
                        delivered += now.len();
                        payload = later;
                        // One of nothing is not the end.
                        if delivered == 0 {
                            *reader = Some((into, max));
                        }
                    }
                    self.plain.append(payload).map_err(TlsFailure::of_socket).map_err(failed)?;
                }
                (delivered > 0).then_some(Standing::Open)
            }
            ConnectionState::PeerClosed => {
                *self.is_ended = true;
                None
            }
            ConnectionState::Closed => Some(Standing::Ended),
            ConnectionState::BlockedHandshake => Some(Standing::Handshake),
            ConnectionState::WriteTraffic(_) => Some(Standing::Open),
            other => {
                discard += of_one_side(other, self.plain).map_err(failed)?;
                *self.has_early = true;
                None
            }
        };
        Ok(Stepped { discard, standing, delivered })
    }
}
