//! Making a region fast before it is used: page tables filled in parallel, and huge pages. Neither changes a byte,
//! so both may run while the region is in use.
#![allow(unsafe_code, reason = "advice to the kernel about raw address ranges")]

use std::io;
use std::ops::ControlFlow;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mm::{self, Advice};

use super::files::failed;
use super::map::HUGE_PAGE;
use super::{Phase, Progress, Region};
use crate::error::{Error, Result};

/// What a thread populates at a time: tens of milliseconds.
const PIECE: u64 = 64 << 20;
/// More threads than this only fight over the kernel's locks.
const MOST_THREADS: usize = 8;
/// How often the caller hears of progress.
const TICK: Duration = Duration::from_millis(50);
/// The least page there is; touching more often than needed is harmless.
const PAGE: usize = 4096;

/// Mapped memory that outlives the threads which work on it.
#[derive(Clone, Copy)]
struct Span {
    begin: *mut u8,
    len: u64,
}

// SAFETY: an address and a length; what is done with them below is sound from any thread.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// Its pieces of at most `len` bytes.
    fn pieces(self, len: u64) -> impl Iterator<Item = Span> {
        (0..self.len).step_by(len as usize).map(move |offset| Span {
            begin: self.begin.wrapping_add(offset as usize),
            len: len.min(self.len - offset),
        })
    }

    /// Gives every page memory and an entry in the page table.
    fn populate(self) -> io::Result<()> {
        // SAFETY: the span is mapped, as the region lives; populating changes no content.
        let advised = unsafe { mm::madvise(self.begin.cast(), self.len as usize, Advice::LinuxPopulateWrite) };
        match advised {
            Ok(()) => Ok(()),
            // Kernels before 5.14.
            Err(Errno::INVAL) => {
                self.touch();
                Ok(())
            }
            Err(e) => Err(e.into()),
        }
    }

    /// The same by hand. A read is enough: a shared mapping gets the file's own page, writable, at once; and a
    /// write of what was just read could undo another process's write in between.
    fn touch(self) {
        for offset in (0..self.len as usize).step_by(PAGE) {
            let place = self.begin.wrapping_add(offset);
            // SAFETY: within the span, which is mapped and has memory reserved behind it; the value is not used,
            // so it does not matter that another process may be writing it.
            unsafe { ptr::read_volatile(place) };
        }
    }

    /// Makes one huge page of it. False if the kernel cannot now.
    fn collapse(self) -> io::Result<bool> {
        // SAFETY: the span is mapped, as the region lives; collapsing changes no content.
        let status = unsafe { libc::madvise(self.begin.cast(), self.len as usize, libc::MADV_COLLAPSE) };
        if status == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // No huge page free, or this one is in use in a way that forbids it: the rest may still do.
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => Ok(false),
            _ => Err(error),
        }
    }
}

impl Region {
    fn data_span(&self) -> Span {
        Span { begin: self.data.begin(), len: self.data.len() }
    }

    fn control_span(&self) -> Span {
        Span { begin: self.control.base(), len: self.control.len() }
    }

    /// Fills the page tables of the whole region, so that no later access faults; `threads` work at it (0: as
    /// many as there are cores, 8 at the most). Changes no byte, so the region may be in use. Returns the
    /// bytes populated: those of the whole file. May be called from any thread; `progress` is called in this one.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `progress` asks to stop; [`Error::Closed`] after [`Region::close`] or a fork;
    /// [`Error::Region`] if the kernel cannot.
    pub fn populate(&self, threads: usize, progress: Progress<'_>) -> Result<u64> {
        self.check_usable()?;
        let pieces: Vec<Span> =
            [self.control_span(), self.data_span()].into_iter().flat_map(|span| span.pieces(PIECE)).collect();
        let threads = if threads == 0 { default_threads() } else { threads };
        let total = self.control.len() + self.data.len();
        match populate_all(&pieces, threads.min(pieces.len()), total, progress) {
            Ok(ControlFlow::Continue(())) => Ok(total),
            Ok(ControlFlow::Break(())) => Err(Error::Interrupted { doing: "populating a region" }),
            Err(e) => Err(failed(&self.path, "populating", e)),
        }
    }

    /// Asks the kernel to make the data area of huge pages: slow (seconds per GiB), but it makes every later
    /// copy and registration cheaper. Changes no byte. Returns the bytes that are huge pages now, which is 0 where
    /// the kernel cannot do it. May be called from any thread.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `progress` asks to stop; [`Error::Closed`] after [`Region::close`] or a fork.
    pub fn collapse_huge_pages(&self, progress: Progress<'_>) -> Result<u64> {
        self.check_usable()?;
        let total = self.data.len() / HUGE_PAGE * HUGE_PAGE;
        let whole = Span { begin: self.data.begin(), len: total };
        let (mut done, mut collapsed) = (0, 0);
        for piece in whole.pieces(HUGE_PAGE) {
            if let ControlFlow::Break(()) = progress(Phase::Collapsing, done, total) {
                return Err(Error::Interrupted { doing: "making huge pages" });
            }
            match piece.collapse() {
                Ok(true) => collapsed += HUGE_PAGE,
                Ok(false) => {}
                // Not supported here; asking for the next one would be answered alike.
                Err(_) => break,
            }
            done += HUGE_PAGE;
        }
        Ok(collapsed)
    }
}

fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(MOST_THREADS))
}

/// Populates all pieces on `threads` threads; this one only tells the progress, because `progress` may not
/// leave it and the others may be in the kernel for long.
fn populate_all(pieces: &[Span], threads: usize, total: u64, progress: Progress<'_>) -> io::Result<ControlFlow<()>> {
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (report, reports) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut started = 0;
        for _ in 0..threads {
            let (next, stop, report) = (&next, &stop, report.clone());
            let work = move || work_through(pieces, next, stop, &report);
            match std::thread::Builder::new().name("ecpool-populate".to_owned()).spawn_scoped(scope, work) {
                Ok(_) => started += 1,
                // Fewer threads do as well.
                Err(_) if started > 0 => break,
                Err(e) => return Err(e),
            }
        }
        drop(report);
        follow(&reports, &stop, total, progress)
    })
}

fn work_through(pieces: &[Span], next: &AtomicU64, stop: &AtomicBool, report: &mpsc::Sender<io::Result<u64>>) {
    while !stop.load(Ordering::Relaxed) {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(piece) = pieces.get(index as usize) else { return };
        let done = piece.populate().map(|()| piece.len);
        // Fails when nobody follows any more.
        if report.send(done).is_err() {
            return;
        }
    }
}

/// Tells the progress until all workers are done, or have been told to stop and did.
fn follow(
    reports: &mpsc::Receiver<io::Result<u64>>,
    stop: &AtomicBool,
    total: u64,
    progress: Progress<'_>,
) -> io::Result<ControlFlow<()>> {
    let (mut done, mut outcome) = (0, Ok(ControlFlow::Continue(())));
    loop {
        match reports.recv_timeout(TICK) {
            Ok(Ok(len)) => done += len,
            Ok(Err(e)) => {
                stop.store(true, Ordering::Relaxed);
                outcome = Err(e);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return outcome,
        }
        let stopped = stop.load(Ordering::Relaxed);
        if !stopped && progress(Phase::Populating, done, total).is_break() {
            stop.store(true, Ordering::Relaxed);
            outcome = Ok(ControlFlow::Break(()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_span_without_gap_or_overlap() {
        let span = Span { begin: ptr::dangling_mut(), len: 10 };
        let pieces: Vec<(usize, u64)> =
            span.pieces(4).map(|p| (p.begin as usize - span.begin as usize, p.len)).collect();
        assert_eq!(pieces, [(0, 4), (4, 4), (8, 2)]);
    }

    #[test]
    fn touching_by_hand_leaves_every_byte() {
        let mut bytes = vec![7u8; 3 * PAGE + 5];
        Span { begin: bytes.as_mut_ptr(), len: bytes.len() as u64 }.touch();
        assert!(bytes.iter().all(|&byte| byte == 7));
    }

    #[test]
    fn an_error_of_one_worker_stops_the_others_and_is_told() {
        // Not mapped by anybody, so the kernel refuses.
        let bad = Span { begin: ptr::without_provenance_mut(1 << 12), len: PAGE as u64 };
        let pieces = [bad; 64];
        let result = populate_all(&pieces, 2, 64, &mut |_, _, _| ControlFlow::Continue(()));
        assert!(result.is_err());
    }
}
