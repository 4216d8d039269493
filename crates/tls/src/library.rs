//! The library's connection, of either side. States that both sides have in common are handled once.

use std::io;
use std::ops::Deref;

use gale_runtime::{Buffer, Lease};
use rustls::CommonState;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, EncryptError, UnbufferedStatus, WriteTraffic};

use super::failure::TlsFailure;
use super::stream::{Outgoing, Progress, Reading, Standing};

pub(super) enum Library {
    /// Gale is the server.
    Server(UnbufferedServerConnection),
    /// Gale is the client.
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

/// Input and output of one step of the session.
pub(super) struct Step<'s> {
    /// Decrypted bytes that the reader has not taken yet.
    pub plain: &'s mut Buffer,
    pub outgoing: &'s mut Outgoing,
    pub reading: &'s mut Reading,
    pub progress: &'s mut Progress,
}

/// Result of a step.
pub(super) struct Stepped {
    /// Received bytes that were consumed.
    pub discard: usize,
    /// State in which the session waits; `None` if another step follows.
    pub standing: Option<Standing>,
    /// Bytes delivered to the reader.
    pub delivered: usize,
}

/// Received bytes that were consumed, and why the step failed.
pub(super) type StepFailed = (usize, TlsFailure);

/// Data for the session to send.
#[derive(Clone, Copy)]
pub(super) enum Writing<'p> {
    /// Application data, to be encrypted.
    Plain(&'p [u8]),
    /// The alert close_notify.
    CloseNotify,
}

impl Library {
    /// Processes received bytes.
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

    /// Processes received bytes on a thread that may block, up to and including the step that signs; a client sends
    /// something before that. Returns how many received bytes were consumed and appends the bytes to send to `encoded`.
    /// The later steps are quick.
    pub fn step_slowly(&mut self, incoming: &mut [u8], encoded: &mut Vec<u8>) -> Result<usize, StepFailed> {
        /// Returns `true` if the session may have more to do.
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
                // The next step returns it again.
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

    /// Encodes the alert for the peer after a failure; `None` if there is none.
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

    /// Encodes data into a lease of about this size. All received bytes must have been processed. Also returns how many
    /// received bytes were consumed.
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
        // A response to a KeyUpdate is sent first.
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

/// Appends the bytes to send to `encoded`.
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
                        // An empty record is not the end.
                        if delivered == 0 {
                            *reader = Some((into, max));
                        }
                    }
                    self.plain.append(payload).map_err(TlsFailure::of_socket).map_err(failed)?;
                }
                (delivered > 0).then_some(Standing::Open)
            }
            ConnectionState::PeerClosed => {
                *self.reading = Reading::Ended;
                None
            }
            ConnectionState::Closed => Some(Standing::Ended),
            ConnectionState::BlockedHandshake => Some(Standing::Handshake),
            ConnectionState::WriteTraffic(_) => Some(Standing::Open),
            other => {
                discard += of_one_side(other, self.plain).map_err(failed)?;
                *self.progress = Progress::Early;
                None
            }
        };
        Ok(Stepped { discard, standing, delivered })
    }
}
